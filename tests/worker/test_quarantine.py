"""A record of a newer version stops its markers partition until an operator puts the record into quarantine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marq.wire.marker_codec import encode
from marq.wire.markers import Ack
from marq_worker.broker import EmbeddedBroker
from tests.unit.core.batches import NEWER
from tests.worker.harness import HOLDER, Namespace, Worker, eventually, header
from tests.worker.shell import Shell

pytestmark = pytest.mark.verify


async def test_a_partition_that_a_newer_version_stops_goes_on_without_a_restart_when_an_operator_says_so(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq, Shell(worker) as shell:
        behind = await marq.send("q")
        number = marq.partition_of(behind.source)

        async def partition() -> dict[str, Any]:
            return (await worker.partitions()).get(number, {})

        # Bytes that no Marq can have written stop nothing, and are kept.
        whole = encode(Ack("q", HOLDER, behind.source, [5]))
        garbage = [b"\x02mq", b"\x00garbage", b"", whole[:-3], whole + b"!"]
        bad = [await marq.mark(value, number) for value in garbage]
        bad.append(await marq.producer.send_and_wait(worker.names.markers, None, b"a tombstone", partition=number))
        await marq.applied(bad[-1])
        before = (await worker.owned_partitions())[number]
        assert (before["quarantined"], before["alarm"]) == (6, "")
        kept = await eventually(lambda: marq.records(worker.names.quarantine), lambda records: len(records) == 6)
        assert [record.value for record in kept] == [*garbage, b""]
        origins = [f"{worker.names.markers}/{number}/{record.offset}" for record in bad]
        assert [header(record)["marq-origin"].decode() for record in kept] == origins
        assert all(header(record)["marq-reason"] for record in kept)

        # A record that a newer Marq may have written does, and each alarm says what to type.
        stop = await marq.mark(NEWER, number)
        await marq.acquire(behind, lease=0.2)
        stopped = await eventually(partition, lambda found: found.get("alarm"))
        typed = f"marq quarantine {number} {stop.offset}"
        assert (stopped["state"], stopped["applied_offset"] < stop.offset) == ("stopped", True)
        assert "marker version 2, and this Marq knows version 1" in stopped["alarm"]
        assert typed in stopped["alarm"]
        assert typed in worker.log()
        assert typed in (await worker.page("/readyz"))[1]
        assert typed in (await worker.page("/"))[1]
        assert typed in (await shell("check", code=1)).out
        assert typed in (await shell("state")).out
        assert typed in (await shell("quarantine")).out

        # The other partition goes on, and nothing behind the record was read.
        elsewhere = await marq.send("q", partition=1)
        assert (await marq.acquire(elsewhere, lease=0.2)).partition != number
        await eventually(lambda: marq.copies_of(elsewhere))
        assert (await worker.owned_partitions(1))[1 - number]["alarm"] == ""
        assert await marq.copies_of(behind) == []
        assert "upgrade the workers" in (await worker.page("/"))[1]
        assert (await marq.committed()).get(number, 0) <= stop.offset, "it must be read again after an upgrade"

        # Nothing but that record, and nothing without an answer.
        other = await shell("quarantine", str(number), str(stop.offset + 1), "--yes", code=1)
        assert f"it stops before offset {stop.offset}; nothing was changed" in other.err
        assert "no record stops it" in (await shell("quarantine", str(1 - number), "0", "--yes", code=1)).err
        assert "there is no markers partition 7" in (await shell("quarantine", "7", "0", "--yes", code=1)).err
        refused = await shell("quarantine", str(number), str(stop.offset), answer="n\n", code=1)
        assert "may be lost or delivered twice" in refused.err
        assert "nothing was changed" in refused.err
        assert (await partition())["state"] == "stopped"

        told = await shell.json("quarantine", str(number), str(stop.offset), "--why", "a typo", "--yes")

        assert (told["applied"], told["why"]) == (True, "a typo")
        await eventually(lambda: marq.copies_of(behind))
        assert await eventually(partition, lambda found: found.get("state") == "owner" and not found["alarm"])
        # Called again it changes nothing, and what was ordered can be looked up.
        assert await shell.json("quarantine", str(number), str(stop.offset), "--yes") == told
        assert await shell.json("quarantine") == {"stopped": [], "quarantined": [told]}
        kept = (await marq.records(worker.names.quarantine))[-1]
        assert kept.value == NEWER
        assert header(kept)["marq-origin"].decode() == f"{worker.names.markers}/{number}/{stop.offset}"
        assert header(kept)["marq-reason"].endswith(b": a typo")

        # Ordered while no worker lives it stands, and the next owner applies it: one that is killed after the order
        # could do no more than that.
        worker.kill()
        stop = await marq.mark(NEWER + b"!", number)
        later = await shell("quarantine", str(number), str(stop.offset), "--yes", code=1)
        assert "the request is saved" in later.out
        worker = await new_worker(like=worker).start().ready(2)
        await marq.applied(stop)
        assert [order["applied"] for order in (await shell.json("quarantine"))["quarantined"]] == [True, True]
        assert [record.value for record in await marq.records(worker.names.quarantine)][6:] == [NEWER, NEWER + b"!"]
