"""`python -m marq_worker`: the command `marq`."""

import os
import signal
import sys
from typing import NoReturn

#: Of a handlers process (config/settings.py).
_HANDLERS_PROCESS = "MARQ_HANDLERS_PROCESS"


def main() -> NoReturn:
    if _HANDLERS_PROCESS in os.environ:
        # Ctrl-C in a terminal reaches all its processes. The worker stops this one; while it still imports, a
        # KeyboardInterrupt would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from marq_worker.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in {"marq", "marq_worker"}:
            raise
        sys.exit(f"marq: the command needs the packages of a worker ({error}): pip install 'marq[worker]'")
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
