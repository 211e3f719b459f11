"""The files of live windows in a data directory: ``python -m pipeline ingest`` writes them, the dashboard reads them.

``live/windows/FOLDER/HOUR.jsonl`` has the minutes of an hour in which a queue had events, one per line: ``at`` (the
begin, in seconds since 1970), ``queue``, the counts of the table ``stats`` that are not 0, and its times that are not
null. HOUR is the number of the hour since 1970. An empty ``queue`` stands for all queues together.

``live/status.json`` says which minutes are known: those from ``begin_s`` to ``computed_ms``, both since 1970.
"""

from __future__ import annotations

import hashlib

#: The format of these files; readers ignore all others.
VERSION = 1
STATUS_FILE = "live/status.json"
WINDOWS_FOLDER = "live/windows"
MINUTE_S, HOUR_S = 60, 3_600
#: Older windows are deleted.
KEEP_S = 7 * 24 * HOUR_S
#: Queues with windows, the busiest ones: each has at most 169 files, of about 10 KB.
MAX_QUEUES = 200


def windows_folder(queue: str) -> str:
    """Return the folder of a queue, or of all queues together for an empty name."""
    # A name may be longer than that of a file, and contain any character.
    return f"{WINDOWS_FOLDER}/{hashlib.sha256(queue.encode()).hexdigest()[:32]}"


def hour_file(hour: int) -> str:
    """Return the name of an hour's file."""
    return f"{hour:09}.jsonl"
