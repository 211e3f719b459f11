"""``python -m pipeline JOB …``, and the file for spark-submit."""

import sys
from pathlib import Path

if not __package__:
    # When run as a file, its directory comes first on the path and hides packages with the names of its modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
