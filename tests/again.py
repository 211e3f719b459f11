"""``python -m tests.again``: the few tests that failed beside all others, once more and by themselves.

While all tests run, three processes of them share the machine with their brokers, workers and Spark, and a limit may be
over that has nothing to do with what is tested. What fails again has failed. So has, without a second chance, what may
have shown a lost message, and what is more than an accident: more than a few failures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: Where pytest notes what failed, in the directory that it was started in.
NOTED = Path(".pytest_cache/v/cache/lastfailed")
FEW = 3
#: They look for lost messages under faults: such a one need not show twice.
DECISIVE = ("tests/faults/", "tests/simulation/")


def main() -> int:
    failed = sorted(json.loads(NOTED.read_text())) if NOTED.exists() else []
    if not failed or len(failed) > FEW or any(each.startswith(DECISIVE) for each in failed):
        return 1
    print(f"once more, by themselves: {', '.join(failed)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", *failed], check=False).returncode
    if code == 0:
        print(f"failed beside others and passed by themselves: {', '.join(failed)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
