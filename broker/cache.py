"""Where downloads live: outside the repository, shared by all checkouts of one user."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from broker.errors import BrokerError


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """$MARQ_CACHE, or $XDG_CACHE_HOME/marq, or ~/.cache/marq."""
    own, shared = environment.get("MARQ_CACHE"), environment.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().resolve()
    # The XDG specification says that a relative path is to be ignored.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "marq"
    return Path.home() / ".cache" / "marq"


def cannot_write(error: OSError, path: Path) -> BrokerError:
    """The sentence for a cache that takes nothing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BrokerError(f"no space left for {path}: make room there, or set MARQ_CACHE to a disk with 300 MB free")
    return BrokerError(f"cannot write {path} ({error.strerror}): set MARQ_CACHE to a directory that you may write")
