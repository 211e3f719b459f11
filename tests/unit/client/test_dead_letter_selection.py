"""A read of the dead letters' topic that does not come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

import marq
from marq.dead_letters.log import Stored
from marq.dead_letters.selection import Survey


class Stuck:
    """A log of which nothing comes."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def ranges(self) -> dict[int, range]:
        return {0: range(7)}

    def seek(self, positions: Mapping[int, int]) -> None: ...

    async def read(self) -> Sequence[Stored]:
        await asyncio.sleep(0.01)
        return []

    async def positions(self) -> dict[int, int]:
        return {0: 3}


async def test_a_read_that_gets_no_records_ends_with_an_error() -> None:
    survey = Survey("dead", lambda queue, record: True)

    with pytest.raises(marq.BrokerUnavailable, match=r"no progress for 0\.1 s at \{0: 3\}; they end at \{0: 7\}"):
        await survey.make(Stuck(), 0.1)
