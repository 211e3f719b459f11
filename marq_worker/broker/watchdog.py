"""Kills a process group when the process that started it is gone, even after kill -9.

Arguments: the parent, the group, then the temporary directories to delete after it.

It runs as a sibling of the broker. PR_SET_PDEATHSIG would be less code, but follows the thread that forked: a broker
that was started in a worker thread (asyncio.to_thread) would die with it.
"""

import os
import shutil
import signal
import sys
import time

INTERVAL_SECONDS = 0.25


def main() -> None:
    parent, group = int(sys.argv[1]), int(sys.argv[2])
    # An orphan gets another parent, so a reused process id does no harm.
    while os.getppid() == parent:
        if not _exists(group):
            return
        time.sleep(INTERVAL_SECONDS)
    while _exists(group):
        os.killpg(group, signal.SIGKILL)
        time.sleep(INTERVAL_SECONDS)
    for temporary_directory in sys.argv[3:]:
        shutil.rmtree(temporary_directory, ignore_errors=True)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
