"""What a worker does about its memory, which holds millions of small objects for hours.

Python looks for garbage in all of them again and again while they become more: with a million delayed messages for half
a second at a time. There is none: what a worker drops, it drops by its references. So it is looked for rarely.

And it gives back to the system what it does not need any more. It reads, keeps for a second, and writes buffers of a
hundred kilobytes and more, between objects that live for hours. They leave holes in the C library's heap that it keeps
for later: with a million delayed messages a third of the process. (Mappings of their own for such buffers would leave
none, and cost a third of the tracker's time.)
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

#: Objects that were made and not dropped between two looks for garbage among the newest, and how many of those make
#: one among older ones, and of these among all.
GARBAGE_THRESHOLDS = (50_000, 20, 100)
#: How often the heap is looked at, and by how many unused bytes it must have grown to be worth it.
LOOK_SECONDS = 1.0
WORTH_BYTES = 48 << 20


def look_for_garbage_rarely() -> None:
    """Let Python look for garbage so rarely that it holds up nobody."""
    gc.set_threshold(*GARBAGE_THRESHOLDS)


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
        known = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            # Pages that were given back count as unused until they are used again.
            known = min(known, self.unused_bytes)
            if self.unused_bytes - known > WORTH_BYTES:
                await asyncio.to_thread(self.give_back)
                known = self.unused_bytes
