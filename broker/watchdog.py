"""Kills a process group once the process that started it is gone, also when that one got kill -9.

Run as a script of its own, a sibling of the broker. PR_SET_PDEATHSIG would be less code, but it follows the thread that
forked: a broker started in a worker thread (asyncio.to_thread) would die with that thread's pool.
"""

import os
import signal
import sys
import time

INTERVAL_SECONDS = 0.25


def main() -> None:
    parent, group = int(sys.argv[1]), int(sys.argv[2])
    # An orphan gets another parent: this cannot be fooled by a reused process id.
    while os.getppid() == parent:
        if not _exists(group):
            return
        time.sleep(INTERVAL_SECONDS)
    if _exists(group):
        os.killpg(group, signal.SIGKILL)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
