"""Local tables and their changelogs: what may be believed when the two no longer belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import Namespace, Worker, delete_topic

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
FOR_LONG = 600.0


async def test_a_local_table_of_a_recreated_changelog_is_not_trusted(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """The changelog is lost; one worker rebuilds it, and it grows past the position of another worker's old files.

    Found by the simulation: mutant "only a table that is ahead of its changelog is thrown away".
    """
    one = await new_worker(environment={"MARQ_DATA_DIR": str(tmp_path / "one")}).start().ready()
    async with Namespace(broker.bootstrap_servers, one.names) as marq:
        ended = await marq.send_many("ended", 5)
        await marq.applied(await marq.acquire(*ended, lease=FOR_LONG))
        await one.stop()
        two = await new_worker(like=one, MARQ_DATA_DIR=str(tmp_path / "two")).start().ready()
        await two.stop()

        await delete_topic(broker.bootstrap_servers, one.names.changelog)
        await marq.ack(*ended)
        still_open = await marq.send_many("still-open", 5)
        await marq.acquire(*still_open, lease=FOR_LONG)

    one = await new_worker(like=one).start().ready()
    async with Namespace(broker.bootstrap_servers, one.names) as marq:
        others = await marq.send_many("others", 100)
        await marq.applied(await marq.acquire(*others, lease=FOR_LONG))
    await one.stop()

    two = await new_worker(like=two).start().ready()

    held = {queue: (await two.queue(queue)).get("in_flight", 0) for queue in ("ended", "still-open", "others")}
    assert held == {"ended": 0, "still-open": 5, "others": 100}
