"""Unused memory returns to the system; tested in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import asyncio
from marq_worker import memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main():
    # Between those that are freed there are some that stay.
    held = [bytes(40_000 + number % 7) for number in range(4_000)]
    kept = held[::40]
    del held
    before = resident()
    memory.LOOK_SECONDS = 0.05
    heap = memory.Heap()
    assert heap.unused_bytes > memory.WORTH_BYTES
    await heap.start()
    async with asyncio.timeout(60):
        while (before - resident()) >> 20 <= 100:
            await asyncio.sleep(0.01)
    await heap.stop()
    assert kept

asyncio.run(main())
"""


def test_collections_skip_objects_that_were_frozen_before_handlers_began() -> None:
    script = "import gc; from marq_worker import memory; memory.freeze_objects(); print(gc.get_freeze_count())"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert int(done.stdout) > 1_000


def test_holes_in_the_heap_are_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=180, check=False)

    assert (done.returncode, done.stderr) == (0, "")
