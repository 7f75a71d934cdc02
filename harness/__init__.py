"""What a run of any model needs: files, documents, devices, ranks, models, instruments.  Imports \
nothing above it."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]  # the folder of this workshop
