"""The waiting messages of a queue are searched, in an order, as far as a limit allows."""

from __future__ import annotations

import marq
from marq.kafka.inspector import Inspector
from marq.settings.client import ClientSettings


async def test_waiting_messages_are_filtered_and_sorted_and_the_search_tells_how_far_it_went(
    producer: marq.Producer, queues: marq.Queues, servers: str, prefix: str
) -> None:
    inspector = Inspector(ClientSettings.read(servers, {"prefix": prefix}, owner="test"), queues.definitions)
    for number in range(20):
        await producer.send("emails", b"x" * number, headers={"tenant": b"acme" if number % 2 else b"other"})
        await producer.send("others", b"y")

    found = await inspector.search(
        "emails",
        3,
        fits=lambda message: dict(message.headers)["tenant"] == b"acme",
        order=lambda message: -len(message.row.value or b""),
    )
    cut = await inspector.search("emails", 100, limit=10)
    late = await inspector.search("emails", 100, limit_s=0.0)

    assert [len(message.row.value or b"") for message in found.messages] == [19, 17, 15]
    assert (found.matching, found.waiting, found.scanned, found.complete) == (10, 20, 40, True)
    assert cut.scanned <= 10
    assert cut.waiting == len(cut.messages) == cut.matching < 20
    assert (cut.complete, late.complete, late.scanned) == (False, False, 0)
