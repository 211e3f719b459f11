"""Python packages that only the set-up needs, and only on some machines: kept in the cache, not in the environment."""

import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from broker import cache, command

LOCKS = Path(__file__).with_name("locks")


def directory(name: str) -> Path:
    """Where the packages of `locks/NAME.txt` are, or would be: compiled ones differ by version of Python."""
    lock = sha256((LOCKS / f"{name}.txt").read_bytes()).hexdigest()[:12]
    return cache.directory() / f"{name}-{lock}-{sys.implementation.cache_tag}"


def install(name: str) -> Path:
    """Install them, checked against the lock's hashes. Raises command.Failed or BrokerError."""
    target = directory(name)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            new = Path(scratch) / "packages"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            lock = LOCKS / f"{name}.txt"
            command.run(f"installing {name} with pip", [*pip, "--require-hashes", "--target", new, "-r", lock])
            new.rename(target)
    except OSError as error:
        if target.is_dir():
            return target  # another set-up was quicker
        raise cache.cannot_write(error, target) from error
    return target
