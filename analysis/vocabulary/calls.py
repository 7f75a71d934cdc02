"""What does a call of a GPU's runtime or driver do, by its name?"""

import re

from analysis.vocabulary.roles import Meaning, table

BEGINS_CAPTURE = "StreamBeginCapture"
CALLS = table("calls")  # role by pattern


def call_meaning(name: str) -> Meaning:
    return Meaning(next((role for pattern, role in CALLS.items() if re.search(pattern, name)), None))
