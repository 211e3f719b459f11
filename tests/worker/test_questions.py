"""Questions and what is done after them, on a real worker: only what existed when somebody was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import quote

import marq
from broker import EmbeddedBroker
from marq import purging
from marq.settings import ClientSettings
from tests.worker.harness import LIMIT_SECONDS, Installation, Worker, eventually


async def test_a_purge_ends_only_what_existed_when_it_was_asked_about(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    settings = ClientSettings.read(broker.bootstrap_servers, {"prefix": worker.names.prefix}, environment={})
    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:
        await producer.send_many("emails", [b"waits"] * 30)
        await producer.send_many("emails", [b"delayed"] * 5, delay=3_600)
        meant, extent = await purging.meant(settings, "emails", delayed=True)
        await producer.send_many("emails", [b"later"] * 4)
        await producer.send_many("emails", [b"delayed later"] * 3, delay=3_600)

        # As a form of the dashboard carries it.
        purged = await purging.purge(settings, "emails", delayed=True, extent=purging.Extent.parse(str(extent)))

    left, _ = await purging.meant(settings, "emails", delayed=True)
    assert (meant.waiting, meant.delayed) == (purged.waiting, purged.delayed) == (30, 5)
    assert (left.waiting, left.delayed) == (4, 3)


async def test_messages_in_flight_name_the_consumer_that_has_them(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    options = {"bootstrap_servers": broker.bootstrap_servers, "prefix": worker.names.prefix}

    async def consumers(queue: str) -> dict[str, str | None]:
        _, page = await worker.page(f"/api/queues/{quote(queue, safe='')}/messages?state=in_flight")
        messages = json.loads(page).get("messages", ())
        return {each["place"]: (each["consumer"] or {}).get("client_id") for each in messages}

    async with (
        Installation(broker.bootstrap_servers, worker.names) as installation,
        marq.Producer(**options) as producer,
        marq.Consumer("a/b", client_id="billing", lease=600, **options) as billing,
    ):
        await producer.send("a/b", b"x")
        [held] = await billing.receive(wait=LIMIT_SECONDS)
        place = f"{worker.names.messages}/{held.partition}/{held.offset}"
        # By a holder that no member of the group names, as after a consumer was killed.
        left = await installation.send("left", b"y")
        await installation.acquire(left, lease=600)

        await eventually(lambda: consumers("a/b"), lambda found: found == {place: "billing"})
        await eventually(lambda: consumers("left"), lambda found: found == {left.id: None})
        async with marq.Consumer("a/b", client_id="other", **options):
            # A rebalance gives each member new partitions and a new holder; the message stays with its consumer.
            await eventually(lambda: members(worker), lambda found: found == {"billing", "other"})
            assert await consumers("a/b") == {place: "billing"}


async def members(worker: Worker) -> set[str]:
    """Return the consumers of the queue, as the worker has looked them up last."""
    _, page = await worker.page(f"/api/queues/{quote('a/b', safe='')}")
    return {each["client_id"] for each in json.loads(page)["consumers"] or () if each["partitions"]}
