"""``marq init``: the files of a new project."""

from __future__ import annotations

import re
from pathlib import Path

from marq.wire.errors import MarqError

#: Characters of a project's name that come from its directory.
MAX_NAME = 60

MARQ_TOML = """\
# MARQ_HANDLERS, MARQ_BOOTSTRAP_SERVERS, ... in the environment or in .env override these settings.
[settings]
project = "{project}"   # a worker only removes definitions of queues that this project has published
handlers = ["tasks"]

# For all queues; [queues.NAME] overrides them for one.
[defaults]
lease = 30            # seconds until an unacknowledged message is redelivered
max_attempts = 5      # deliveries, including the first; then the message becomes a dead letter

[queues.greetings]
max_attempts = 2
backoff = {{ base = 1, factor = 2, max = 600 }}
"""

TASKS = """\
import marq


@marq.handler("greetings")
async def greet(name: str) -> None:
    if name == "Zoe":
        raise ValueError("Zoe has moved away")
    print(f"Hello, {name}!", flush=True)
"""

TEST_TASKS = """\
import asyncio

import marq

import tasks


def test_greet(marq_broker, capsys):
    async def send_and_handle():
        async with marq.Producer() as producer:
            await producer.send("greetings", b"Ann")
        await marq_broker.run(tasks.greet)

    asyncio.run(send_and_handle())

    assert capsys.readouterr().out == "Hello, Ann!\\n"
"""

FILES = {"marq.toml": MARQ_TOML, "tasks.py": TASKS, "test_tasks.py": TEST_TASKS}


def project_name(directory: Path) -> str:
    """Return a name for the project in a directory, from the directory's name."""
    return re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("-.")[:MAX_NAME] or "project"


def write_project(directory: Path) -> list[Path]:
    """Write the files; raise MarqError if one of them is already there."""
    paths = [directory / name for name in FILES]
    present = [path.name for path in paths if path.exists()]
    if present:
        raise MarqError(f"{', '.join(present)}: already there; run marq init in an empty directory")
    project = project_name(directory)
    for path, text in zip(paths, FILES.values(), strict=True):
        try:
            path.write_text(text.format(project=project) if text == MARQ_TOML else text, encoding="utf-8")
        except OSError as error:
            raise MarqError(f"{path} can't be written: {error.strerror}") from error
    return paths
