"""``python -m tests.browser.chromium``: makes sure that there is a Chromium for the tests of pages.

The system's own is used. Where it is missing it is installed with the system's package manager, if that may be done.
"""

from __future__ import annotations

import shutil
import sys

from marq_worker.broker import downloads

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ADVICE = (
    "the tests of pages need a Chromium, and none of " + ", ".join(NAMES) + " is there: install it with the system's"
    " package manager (Debian: apt-get install chromium)"
)


def find() -> str | None:
    """Return where the browser is, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def main() -> int:
    if find() is None and downloads.system_manager():
        try:
            downloads.install_system_package("chromium")
        except downloads.ToolFailed as error:
            print(f"error: {error}", file=sys.stderr)
    if find() is None:
        # The tests say so, too: all others still run.
        print(f"warning: {ADVICE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
