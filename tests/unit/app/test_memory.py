"""Large buffers go back to the system: in a process of its own, whose C library is changed by it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, sys
from app.memory import MAPPED_BYTES, return_buffers

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if sys.argv[1] == "returned":
    assert return_buffers()
def hold():
    # Each is freed before the next but one is made, which would move the library's own threshold.
    return [bytearray(MAPPED_BYTES) for _ in range(50)]
before = libc.mallinfo2().hblkhd
for _ in range(3):
    held = hold()
print((libc.mallinfo2().hblkhd - before) // MAPPED_BYTES)
"""


@pytest.mark.parametrize(("mode", "mapped"), [("returned", True), ("as it was", False)])
def test_large_buffers_have_mappings_of_their_own(mode: str, mapped: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, mode], capture_output=True, text=True, check=True)

    assert (int(done.stdout) >= 20) is mapped
