"""Schedules, followed and changed at run time: messages that come again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from marq.core.definitions import Definitions
from marq.core.errors import ConfigError
from marq.core.schedules import LAYERS, Schedule, check_schedule, check_schedule_name, schedule_key, schedule_of
from marq.cron import check_times
from marq.queues import Queues
from marq.settings import ClientOptions
from marq.words import missing, refuse

_FILE, _CHANGE = LAYERS


class ScheduleOptions(TypedDict, total=False):
    """What can be said of a schedule; None takes what was said at run time back, so that queues.toml counts again."""

    queue: str | None
    cron: str | None
    value: str | None
    headers: Mapping[str, str] | None
    timezone: str | None
    enabled: bool | None
    catch_up: bool | None


class Schedules:
    """Reads the schedules of an installation and follows them; defines and removes them at run time.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(self, bootstrap_servers: str | Sequence[str] | None = None, **options: Unpack[ClientOptions]) -> None:
        self._queues = Queues(bootstrap_servers, **options)

    @classmethod
    def of(cls, queues: Queues) -> Self:
        """Return one for somebody who follows the queues' topic already, and starts and stops that."""
        schedules = cls.__new__(cls)
        schedules._queues = queues
        return schedules

    async def start(self) -> None:
        """Read all that is defined, to its end, and go on reading; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong, or the right to read is missing.
        """
        await self._queues.start()

    async def stop(self) -> None:
        """Stop following; does nothing when stopped. What was known stays."""
        await self._queues.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __getattr__(self, name: str) -> Any:
        raise missing("Schedules", name)

    def list(self) -> list[Schedule]:
        """Return all schedules, by name; those that are switched off, too."""
        return [schedule for _, schedule in sorted(self._known(self._queues.definitions).items())]

    def get(self, name: str) -> Schedule | None:
        """Return one schedule, None when there is none of that name."""
        return self._known(self._queues.definitions).get(check_schedule_name(name))

    async def define(self, name: str, **settings: Unpack[ScheduleOptions]) -> Schedule:
        """Say all of a schedule, durably and for everybody, in place of what was said of it at run time before.

        Args:
            name: 1 to 100 of the characters a-z A-Z 0-9 . _ -
            settings: ``queue`` and ``cron`` (five fields, or six with seconds before them); ``value`` and ``headers``
                of the messages, as text; ``timezone``, "UTC" without it; ``catch_up``: deliver each of the times at
                which no worker ran; ``enabled``.

        Raises:
            ConfigError: a name or a value is wrong, something is missing, or the right to write is missing.
            BrokerUnavailable: it is not known to be written.
            TypeError: there is no such setting.
        """
        return await self._merge(name, settings, keep=False)

    async def change(self, name: str, **settings: Unpack[ScheduleOptions]) -> Schedule:
        """Change some settings of a schedule, as :meth:`define`; None for a key takes a former change of it back.

        Raises:
            ConfigError: as for :meth:`define`, or there is no schedule of that name.
            BrokerUnavailable: it is not known to be written.
            TypeError: there is no such setting.
        """
        if self.get(name) is None:
            raise ConfigError(f"there is no schedule {name!r} to change: define it with its queue and its cron")
        return await self._merge(name, settings, keep=True)

    async def remove(self, name: str) -> bool:
        """Take a schedule away that was made at run time, with its message that waits; return whether there was one.

        Raises:
            ConfigError: the name is wrong, queues.toml defines it, or the right to write is missing.
            BrokerUnavailable: it is not known to be done.
        """
        if self._layer(self._queues.definitions, _FILE, name) is not None:
            raise ConfigError(
                f"schedule {name!r} is defined in queues.toml: take it away there, or switch it off with"
                " change(enabled=False); reset() takes back what was changed at run time"
            )
        return await self.reset(name)

    async def reset(self, name: str) -> bool:
        """Take back all that was said of a schedule at run time; return whether there was anything.

        Raises:
            ConfigError: the name is wrong, or the right to write is missing.
            BrokerUnavailable: it is not known to be done.
        """
        there = self._layer(self._queues.definitions, _CHANGE, name) is not None
        await self._queues.merge(
            f"schedule {name!r}",
            schedule_key(_CHANGE, check_schedule_name(name)),
            lambda definitions: self._layer(definitions, _CHANGE, name),
            lambda former: {},
        )
        return there

    async def _merge(self, name: str, settings: Mapping[str, Any], *, keep: bool) -> Schedule:
        check_schedule_name(name)
        refuse("define", {key: value for key, value in settings.items() if key not in ScheduleOptions.__annotations__})
        wanted = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()}

        def merged(former: Mapping[str, Any]) -> dict[str, Any]:
            said = {**(former if keep else {}), **wanted}
            document = {key: value for key, value in said.items() if value is not None}
            self._check(name, document)
            return document

        await self._queues.merge(
            f"schedule {name!r}",
            schedule_key(_CHANGE, name),
            lambda definitions: self._layer(definitions, _CHANGE, name),
            merged,
        )
        found = self.get(name)
        assert found is not None, "it was checked to be whole"
        return found

    def _check(self, name: str, document: Mapping[str, Any]) -> None:
        check_schedule(document, f"schedule {name!r}")
        file = self._layer(self._queues.definitions, _FILE, name) or {}
        check_schedule({**file, **document}, f"schedule {name!r}", whole=True)
        found = schedule_of(name, file, document)
        assert found is not None, "it was checked to be whole"
        check_times(found, time.time())

    @staticmethod
    def _known(definitions: Definitions) -> Mapping[str, Schedule]:
        return definitions.schedules.current

    @staticmethod
    def _layer(definitions: Definitions, layer: str, name: str) -> Mapping[str, Any] | None:
        return definitions.schedules.layer(layer, name)
