"""`python -m marq_worker.broker.environment`: the virtual environment .venv with exactly the locked packages.

The machine's own interpreter runs it, before any package is installed.
"""

import sys
import time
from hashlib import sha256
from pathlib import Path

from marq_worker.broker.downloads import ToolFailed, run_tool
from marq_worker.broker.errors import BrokerError

LOCK = Path("requirements.lock")
VENV = Path(".venv")
#: Without compiling modules: that takes a third of the time, and Python compiles those that are imported.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-compile")


def main() -> int:
    try:
        ensure(LOCK, VENV)
        install_checkout(VENV)
    except BrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def ensure(lock: Path, venv: Path) -> None:
    """Make the environment unless its stamp says that it was made from this lock. Raises BrokerError."""
    stamp = venv / f"locked-{_digest(lock)}"
    python = venv / "bin" / "python"
    if stamp.exists() and python.exists():
        return
    began = time.monotonic()
    # --clear: packages that left the lock would stay and hide a missing dependency.
    create: list[str | Path] = [sys.executable, "-m", "venv", "--clear", venv]
    try:
        run_tool(f"making {venv}", create)
    except ToolFailed as failed:
        if "ensurepip" not in failed.output:
            raise
        raise BrokerError(
            f"{sys.executable} cannot make virtual environments: install its venv module "
            "(Debian, Ubuntu: apt-get install python3-venv), or name another interpreter: make PYTHON=..."
        ) from failed
    print(f"    made {venv} with Python {sys.version.split()[0]}; installing {lock}", flush=True)
    run_tool("installing the locked packages", [python, *PIP, "--require-hashes", "-r", lock])
    stamp.touch()
    print(f"    Python packages: {time.monotonic() - began:.1f} s", flush=True)


def install_checkout(venv: Path) -> None:
    """Install the current directory in place, so that .venv/bin/marq runs it from anywhere. Raises BrokerError."""
    if not (venv / "bin" / "marq").exists():
        options = ("--no-deps", "--no-build-isolation", "--editable")
        run_tool("installing the checkout", [venv / "bin" / "python", *PIP, *options, Path.cwd()])


def _digest(lock: Path) -> str:
    # The interpreter counts too: an environment of another version lacks the compiled packages.
    version = f"{sys.implementation.cache_tag}\n".encode()
    return sha256(version + lock.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
