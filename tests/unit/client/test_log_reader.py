"""A read of a topic that does not come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

import marq
from marq.kafka.log_reader import LogReader
from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.wire.markers import Source

DEAD = Source("dead", 0)


class Stuck(LogReader):
    """A log of which nothing comes."""

    def seek(self, positions: Mapping[Source, int | None]) -> None: ...

    async def poll(self, wait_s: float = 0) -> dict[Source, Records]:
        await asyncio.sleep(0.01)
        return {}

    async def positions(self) -> dict[Source, int]:
        return {DEAD: 3}


async def test_a_read_that_gets_no_records_ends_with_an_error() -> None:
    settings = replace(ClientSettings.read("localhost:1"), request_timeout_ms=100)
    reader = Stuck(settings, committed=True)

    with pytest.raises(marq.BrokerUnavailable, match=r"no progress for 0\.1 s while reading dead/0 at 3 of 7"):
        await anext(reader.read({DEAD: range(7)}))
