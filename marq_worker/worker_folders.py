"""The folder of each worker below ``MARQ_DATA_DIR``: the first one that no other process has locked."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from marq.wire.errors import ConfigError

#: Workers on one machine that share a data directory.
MAX_WORKERS = 64


def claim_folder(data_dir: Path) -> tuple[int, Path, IO[str]]:
    """Take the first free folder below a data directory, for as long as the returned file stays open."""
    for slot in range(MAX_WORKERS):
        folder = data_dir / f"worker-{slot}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"MARQ_DATA_DIR {data_dir}: can't be written ({error}); choose another one") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return slot, folder, lock
    raise ConfigError(f"MARQ_DATA_DIR {data_dir}: {MAX_WORKERS} workers already use it")
