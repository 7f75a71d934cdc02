"""Where the project is."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
