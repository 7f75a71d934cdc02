"""What does a call of a GPU's runtime or driver do, by its name?"""

import re

from analysis.vocabulary.roles import Meaning, first_found, table

BEGINS_CAPTURE = "StreamBeginCapture"
CALLS = table("calls")  # role by pattern
# In the name of a call that takes or gives back memory of the host, which takes long where there is
# much of it.
_OF_HOST_MEMORY = re.compile("Host|MallocManaged")


def call_meaning(name: str) -> Meaning:
    return Meaning(first_found(CALLS, name))


def pins_host_memory(name: str) -> bool:
    return _OF_HOST_MEMORY.search(name) is not None
