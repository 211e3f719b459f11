"""Gives back to the system what the process does not need any more.

A worker reads, keeps for a second, and writes buffers of a hundred kilobytes and more, between objects that live for
hours. They leave holes in the C library's heap that it keeps for later: with a million delayed messages a third of the
process. (Mappings of their own for such buffers would leave none, and cost a third of the tracker's time.)
"""

from __future__ import annotations

import asyncio
import ctypes
import logging

log = logging.getLogger("marq.worker")

#: How often it is looked at, and how many unused bytes are worth it.
LOOK_SECONDS = 1.0
WORTH_BYTES = 32 << 20


class _Mallinfo2(ctypes.Structure):
    """What glibc knows of its heap, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


class Heap:
    """The C library's heap; of another library than glibc nothing is known, and nothing is done."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._info = getattr(library, "mallinfo2", None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._info is not None:
            self._info.restype = _Mallinfo2

    @property
    def unused_bytes(self) -> int:
        """What the heap keeps for later."""
        return 0 if self._info is None else int(self._info().fordblks)

    def give_back(self) -> None:
        """Return unused pages to the system."""
        if self._trim is not None:
            self._trim(0)

    async def live(self) -> None:
        """Give back what is worth it, now and then, without holding anybody up."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.unused_bytes > WORTH_BYTES:
                await asyncio.to_thread(self.give_back)
