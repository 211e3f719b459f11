"""Memory of a worker, which holds millions of small objects for hours.

Python's garbage collector scans all of them again and again as they grow: with a million delayed messages for half a
second at a time. Workers create no cyclic garbage, so it runs rarely.

The heap of the C library is trimmed. Short-lived buffers of a hundred kilobytes between long-lived objects leave holes
that it keeps: with a million delayed messages a third of the process. (Separate mappings for such buffers would leave
no holes, and cost a third of the tracker's time.)
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

from mode import Service

#: Thresholds of the collector's three generations.
GARBAGE_THRESHOLDS = (50_000, 20, 100)
#: Interval to look at the heap, and the growth of unused bytes that is worth a trim.
LOOK_SECONDS = 1.0
WORTH_BYTES = 48 << 20


def look_for_garbage_rarely() -> None:
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def freeze_objects() -> None:
    """Exclude all current objects from collections: modules and definitions of queues live as long as the process.

    Handlers may create cyclic garbage, so collections in their processes are as frequent as Python's default.
    """
    gc.collect()
    gc.freeze()


class _Mallinfo2(ctypes.Structure):
    """glibc's heap statistics, in bytes."""

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


class Heap(Service):
    """The C library's heap; does nothing with libraries other than glibc."""

    def __init__(self) -> None:
        super().__init__()
        library = ctypes.CDLL(None)
        self._info = getattr(library, "mallinfo2", None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._info is not None:
            self._info.restype = _Mallinfo2

    @property
    def unused_bytes(self) -> int:
        return 0 if self._info is None else int(self._info().fordblks)

    def give_back(self) -> None:
        """Return unused pages to the system."""
        if self._trim is not None:
            self._trim(0)

    @Service.task
    async def _trim_now_and_then(self) -> None:
        known = 0
        while not self.should_stop:
            await asyncio.sleep(LOOK_SECONDS)
            # Returned pages count as unused until they are used again.
            known = min(known, self.unused_bytes)
            if self.unused_bytes - known > WORTH_BYTES:
                await asyncio.to_thread(self.give_back)
                known = self.unused_bytes
