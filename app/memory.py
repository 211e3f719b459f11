"""How the process gets its memory from the system: so that what a worker held for a moment does not stay with it.

A worker reads, keeps for a second, and writes buffers of a hundred kilobytes and more, between objects that live for
hours. From the C library's heap they leave holes that nothing fills: with a million delayed messages a third of the
process. In mappings of their own they go back to the system when they are freed.
"""

from __future__ import annotations

import ctypes

#: Buffers from this size on have a mapping of their own; the C library would otherwise raise it up to 32 MiB.
MAPPED_BYTES = 64 << 10
#: Threads share one heap: each with its own would leave the same holes again.
HEAPS = 1
# Of glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def return_buffers() -> bool:
    """Let large buffers go back to the system when they are freed; return False where the C library can't."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_M_MMAP_THRESHOLD, MAPPED_BYTES) and set_option(_M_ARENA_MAX, HEAPS))
