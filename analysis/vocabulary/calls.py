"""What does a call of a GPU's runtime or driver do, by its name?"""

import re

from analysis.vocabulary import roles
from analysis.vocabulary.roles import Meaning

BEGINS_CAPTURE = "StreamBeginCapture"
# The first pattern that is found in the name counts.  Those of HIP are named alike.
CALLS = {
    r"GraphLaunch": roles.GRAPH_LAUNCH,  # starts all kernels of a graph
    r"LaunchKernel|LaunchCooperativeKernel": roles.LAUNCH,
    r"^(cuda|hip)Memcpy(WithStream|2D|3D|DtoH|HtoD|DtoD)?$": roles.BLOCKING_COPY,
    r"Memcpy": roles.COPY,
    r"Memset": roles.SET,
    r"(Device|Stream|Event|Ctx)Synchronize": roles.WAIT,
    r"Malloc|Free|HostAlloc|MemAlloc|HostRegister|HostUnregister": roles.ALLOCATION,
    r"^(cu|hip)Mem(HostAlloc|Create|Map|Unmap|Release|SetAccess|AddressReserve)": roles.ALLOCATION,
    BEGINS_CAPTURE: roles.CAPTURE_BEGIN,
    r"StreamEndCapture": roles.CAPTURE_END,
}


def call_meaning(name: str) -> Meaning:
    return Meaning(next((role for pattern, role in CALLS.items() if re.search(pattern, name)), None))
