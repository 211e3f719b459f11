"""Schedules, followed and changed at run time: messages that are sent at recurring times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

from marq.client.codecs import JSON
from marq.client.lifecycle import Client
from marq.queues.queues import Queues
from marq.settings.client import ClientOptions
from marq.settings.cron import check_times
from marq.settings.definitions import layer_key
from marq.settings.hints import refuse
from marq.settings.schedule_definitions import (
    LAYERS,
    Schedule,
    check_schedule,
    check_schedule_name,
    schedule_of,
)
from marq.wire.errors import ConfigError

_FILE, _CHANGE = LAYERS


class ScheduleOptions(TypedDict, total=False):
    """The settings of a schedule; None removes a change made at run time, so that marq.toml applies again."""

    queue: str | None
    cron: str | None
    value: Any
    headers: Mapping[str, str] | None
    timezone: str | None
    enabled: bool | None
    catch_up: bool | None
    type: str | None


class Schedules(Client):
    """Reads the schedules of a namespace and follows them; defines and removes them at run time.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    def __init__(self, bootstrap_servers: str | Sequence[str] | None = None, **options: Unpack[ClientOptions]) -> None:
        self._queues = Queues(bootstrap_servers, **options)
        self._queues._client = "the Schedules client"

    @classmethod
    def of(cls, queues: Queues) -> Self:
        """Return one that shares a client's queues: each of the two is started and stopped with the other."""
        schedules = cls.__new__(cls)
        schedules._queues = queues
        return schedules

    async def start(self) -> None:
        await self._queues.start()

    async def stop(self) -> None:
        await self._queues.stop()

    def _started(self) -> Queues:
        self._queues._started()
        return self._queues

    def list(self) -> list[Schedule]:
        """Return all schedules by name, including disabled ones."""
        return [schedule for _, schedule in sorted(self._started().definitions.schedules.current.items())]

    def get(self, name: str) -> Schedule | None:
        """Return the schedule of that name, or None."""
        return self._started().definitions.schedules.current.get(check_schedule_name(name))

    async def define(self, name: str, **settings: Unpack[ScheduleOptions]) -> Schedule:
        """Define a schedule for all clients, durably; replaces earlier changes at run time.

        Args:
            name: 1 to 100 of the characters a-z A-Z 0-9 . _ -
            settings: ``queue`` and ``cron`` (five fields, or six with seconds first, or a name such as "@daily");
                ``value`` of the messages: text, or a value that :data:`marq.JSON` encodes, such as a dict, a dataclass
                or a pydantic model; ``headers``, as text; ``type``; ``timezone`` (default "UTC"); ``catch_up``:
                whether the messages of missed times are sent later (default False); ``enabled`` (default True).

        Raises:
            ConfigError: a name or a value is wrong, a key is missing, or the permission to write is missing.
            BrokerUnavailable: it is unknown whether it was written.
            TypeError: unknown setting.
        """
        return await self._merge(name, settings, keep=False)

    async def change(self, name: str, **settings: Unpack[ScheduleOptions]) -> Schedule:
        """Change some settings of a schedule, as with :meth:`define`; None for a key removes an earlier change to it.

        Raises:
            ConfigError: as for :meth:`define`, or the schedule does not exist.
            BrokerUnavailable: it is unknown whether it was written.
            TypeError: unknown setting.
        """
        if self.get(name) is None:
            raise ConfigError(f"schedule {name!r} does not exist: define it with a queue and a cron expression")
        return await self._merge(name, settings, keep=True)

    async def remove(self, name: str) -> bool:
        """Remove a schedule that was defined at run time, with its delayed message; return whether it existed.

        Raises:
            ConfigError: the name is wrong, marq.toml defines it, or the permission to write is missing.
            BrokerUnavailable: it is unknown whether it was done.
        """
        if self._started().definitions.schedules.layer(_FILE, name) is not None:
            raise ConfigError(
                f"schedule {name!r} is defined in marq.toml: remove it there, or disable it with"
                " change(enabled=False); reset() undoes changes made at run time"
            )
        return await self.reset(name)

    async def reset(self, name: str) -> bool:
        """Remove all changes to a schedule made at run time; return whether there were any.

        Raises:
            ConfigError: the name is wrong, or the permission to write is missing.
            BrokerUnavailable: it is unknown whether it was done.
        """
        return await self._started().merge(
            f"schedule {name!r}",
            layer_key(_CHANGE, check_schedule_name(name)),
            lambda definitions: definitions.schedules.layer(_CHANGE, name),
            lambda former: {},
        )

    async def _merge(self, name: str, settings: Mapping[str, Any], *, keep: bool) -> Schedule:
        check_schedule_name(name)
        refuse("define", {key: value for key, value in settings.items() if key not in ScheduleOptions.__annotations__})
        wanted = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
        if (value := wanted.get("value")) is not None and not isinstance(value, str):
            try:
                wanted["value"] = JSON.encode(value).decode()
            except (TypeError, ValueError) as error:
                raise ConfigError(f"schedule {name!r}: value: expected text, or a value for JSON: {error}") from error

        def merged(former: Mapping[str, Any]) -> dict[str, Any]:
            said = {**(former if keep else {}), **wanted}
            document = {key: value for key, value in said.items() if value is not None}
            self._check(name, document)
            return document

        await self._started().merge(
            f"schedule {name!r}",
            layer_key(_CHANGE, name),
            lambda definitions: definitions.schedules.layer(_CHANGE, name),
            merged,
        )
        found = self.get(name)
        assert found is not None, "it was checked to be whole"
        return found

    def _check(self, name: str, document: Mapping[str, Any]) -> None:
        check_schedule(document, f"schedule {name!r}")
        file = self._started().definitions.schedules.layer(_FILE, name) or {}
        check_schedule({**file, **document}, f"schedule {name!r}", whole=True)
        found = schedule_of(name, file, document)
        assert found is not None, "it was checked to be whole"
        check_times(found, time.time())
