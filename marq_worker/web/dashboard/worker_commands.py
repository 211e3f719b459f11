"""Commands to workers: a worker carries out its own, and passes those for others on to them over HTTP.

So an operator can act on each worker from the pages of any of them. A command names the worker that it is for, so that
one which was recorded on its way to a worker works nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiohttp import ClientSession
from yarl import URL

from marq.wire.errors import ConfigError
from marq_worker.web.credentials import Credentials
from marq_worker.web.peers import TrackersGroup, tell

QUIET, UNQUIET, CANCEL = "quiet", "unquiet", "cancel-handler"
#: The path of commands, and the parameter that names the worker.
COMMANDS_PATH, WORKER = "api/commands", "worker"
#: All parameters of commands.
COMMAND_FIELDS = frozenset({WORKER, "queue", "id", "counted"})


class Commanded(Protocol):
    """What a worker can be told to do."""

    def has_handlers(self) -> bool: ...

    def set_quiet(self, quiet: bool) -> None: ...

    async def cancel_handler(self, queue: str, message_id: str, *, counted: bool) -> None: ...


class WorkerCommands:
    """Commands to ``worker``, which is this one, and to others; ``address`` returns its own."""

    def __init__(
        self,
        worker: Commanded,
        address: Callable[[], str],
        group: TrackersGroup,
        client: Callable[[], ClientSession],
        credentials: Credentials,
    ) -> None:
        self._worker = worker
        self._address = address
        self._group = group
        self._client = client
        self._credentials = credentials

    async def send(self, worker: str, command: str, details: Mapping[str, str], who: str) -> Mapping[str, Any]:
        """Let a worker carry out a command in the name of an operator; return the outcome.

        Raises:
            ConfigError: there is no such worker, or it refused.
            MarqError: it is unknown whether the command was carried out.
        """
        if URL(worker) == URL(self._address()):
            return await self.carry_out(command, details)
        url = next((url for url in (await self._group.members()).urls if url == URL(worker)), None)
        if url is None:
            raise ConfigError(f"worker {worker!r} has left, or does not exist: go back and reload the page")
        query = {**details, WORKER: worker}
        return await tell(self._client(), url, f"{COMMANDS_PATH}/{command}", query, who, self._credentials)

    async def receive(self, command: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Carry out a command that another worker passes on; raise as :meth:`send`."""
        if URL(query.get(WORKER, "")) != URL(self._address()):
            raise ConfigError(f"this command is for worker {query.get(WORKER)!r}, and this one is {self._address()}")
        return await self.carry_out(command, {name: value for name, value in query.items() if name != WORKER})

    async def carry_out(self, command: str, details: Mapping[str, str]) -> Mapping[str, Any]:
        """Carry out a command here; raise as :meth:`send`."""
        if command not in (QUIET, UNQUIET, CANCEL):
            raise ConfigError(f"unknown command {command!r}: does the worker run an older version?")
        if not self._worker.has_handlers():
            raise ConfigError("it runs no handlers")
        if command == CANCEL:
            queue, message_id = details.get("queue", ""), details.get("id", "")
            await self._worker.cancel_handler(queue, message_id, counted=details.get("counted") == "yes")
        else:
            self._worker.set_quiet(command == QUIET)
        return {}
