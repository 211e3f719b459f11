"""One process that runs commands one after the other, as each would run in a process of its own: imports take longer
than most of them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.worker.harness import LIMIT_SECONDS, ROOT, Worker


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The answer of a command that was asked for JSON."""
        return json.loads(self.out)


class Shell:
    """Runs ``faust -A app …`` with a worker's settings."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.worker.shell", cwd=self._worker.directory,
            env={**self._worker.environment, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        if kind is not None:
            self._process.kill()
        self._process.stdin.close()
        await self._process.wait()

    async def __call__(self, *arguments: str, answer: str = "", code: int | None = 0) -> Outcome:
        """Run a command that is to end with a code, or any if None; ``answer`` is its standard input."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([arguments, answer]).encode() + b"\n")
        found = Outcome(*json.loads(await asyncio.wait_for(stdout.readline(), LIMIT_SECONDS)))
        assert code in (None, found.code), f"{arguments} ended with {found}"
        return found

    async def json(self, *arguments: str, answer: str = "", code: int = 0) -> Any:
        """Run a command with ``--json``, and return its answer."""
        return (await self(*arguments, "--json", answer=answer, code=code)).document


def _run(arguments: list[str], answer: str) -> Outcome:
    from faust.cli.base import cli  # not at the top: only the process needs it, and it is slow

    out, err, before = io.StringIO(), io.StringIO(), (sys.stdin, sys.stdout, sys.stderr)
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(answer.encode())), out, err
    code: Any = 0
    # Faust looks there for the application whose commands it is to know.
    sys.argv[:] = ["faust", "-A", "app", *arguments]
    try:
        cli(sys.argv[1:])
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            # As Python does at its end.
            print(code, file=err)
            code = 1
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    return Outcome(code or 0, out.getvalue(), err.getvalue())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import faust.cli.faust  # noqa: F401 (its commands, among which ours must find their place)

    for line in sys.stdin:
        answers.write(json.dumps(_run(*json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
