"""Schedules on real workers: each time comes once, although workers are killed and replaced."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

import pytest

import marq
from marq.wire.markers import Delay
from marq_worker.broker import EmbeddedBroker
from tests.worker.conftest import client_of
from tests.worker.harness import Namespace, Worker, eventually, faust, header

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
EACH_SECOND = "* * * * * *"
QUEUE = "reports"


def toml(**settings: Any) -> str:
    """A queues.toml with one schedule."""
    document = {"queue": QUEUE, "cron": EACH_SECOND, **settings}
    return "[schedules.often]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in document.items())


async def sent(namespace: Namespace) -> list[tuple[int, bytes | None]]:
    """The times whose messages were delivered, in the order of the log of each partition, with their values."""
    records = await namespace.records(namespace.names.messages)
    found = [(header(record)["marq-id"], record.value) for record in records if record.key == QUEUE.encode()]
    return sorted((int(identity.decode().rpartition("/")[2]), value) for identity, value in found)


async def until_sent(namespace: Namespace, count: int) -> list[int]:
    """Wait until this many times have come; return all of them."""
    found = await eventually(lambda: sent(namespace), lambda found: len(found) >= count)
    return [moment for moment, _ in found]


def without_a_gap(times: Sequence[int]) -> bool:
    return list(times) == list(range(times[0], times[0] + len(times)))


async def test_kills_and_takeovers_double_no_time_and_lose_none_of_a_schedule_that_catches_up(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    first = await new_worker(queues=toml(catch_up=True)).start().ready()
    async with Namespace(broker.bootstrap_servers, first.names) as namespace:
        await until_sent(namespace, 2)
        other = new_worker(like=first).start()
        await other.ready(1)
        for _ in range(2):
            first.kill()
            # It gets both partitions after the session of the killed one.
            await other.ready(2)
            count = len(await sent(namespace))
            await until_sent(namespace, count + 3)
            first, other = other, new_worker(like=other).start()
            await other.ready(1)
        first.kill()
        other.kill()
        back_s = time.time()
        last = await new_worker(like=other).start().ready(2)
        await eventually(lambda: sent(namespace), lambda found: found[-1][0] >= back_s)
        await last.stop()

        times = [moment for moment, _ in await sent(namespace)]
        assert without_a_gap(times)


async def test_two_workers_plan_each_schedule_once_and_all_pages_show_them(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    other = await new_worker(like=worker).start().ready(1)
    await eventually(worker.partitions, lambda found: len(found) == 1)
    names = [f"s{number}" for number in range(6)]
    async with (
        Namespace(broker.bootstrap_servers, worker.names) as namespace,
        marq.Schedules(**client_of(worker)) as schedules,
    ):
        for name in names:
            await schedules.define(name, queue=QUEUE, cron="0 0 1 1 *", timezone="Europe/Berlin", value=name)
        await schedules.define("often", queue=QUEUE, cron=EACH_SECOND)
        await schedules.define("never", queue=QUEUE, cron=EACH_SECOND, enabled=False)

        async def shown(of: Worker) -> dict[str, dict[str, Any]]:
            status, text = await of.page("/api/schedules")
            found = json.loads(text) if status == 200 else {"complete": False, "schedules": []}
            return {schedule["name"]: schedule for schedule in found["schedules"]} if found["complete"] else {}

        for owner in (worker, other):
            found = await eventually(
                lambda owner=owner: shown(owner),  # type: ignore[misc]
                lambda found: all(found.get(name, {}).get("next") for name in (*names, "often")),
            )
            assert sorted(found) == sorted([*names, "never", "often"])
            assert (found["never"]["next"], found["never"]["enabled"]) == (None, False)
            assert found["s0"]["next"].endswith("-12-31T23:00:00+00:00")
            assert found["s0"]["last"] is None
        found = await eventually(lambda: shown(worker), lambda found: len(found.get("often", {}).get("runs") or ()) > 2)
        # Its last message has a page.
        query = urlencode({"id": found["often"]["last_id"], "queue": QUEUE})

        async def message() -> str:
            status, text = await worker.page(f"/api/message?{query}")
            return str(json.loads(text)["status"]) if status == 200 else ""

        await eventually(message, lambda status: status == "waiting")
        delays = [batch for _, batch in await namespace.markers() if isinstance(batch, Delay)]
        planned = [batch.source.topic.split("/")[1] for batch in delays]
        assert sorted(name for name in planned if name != "often") == names

    code, output, _ = await faust(worker, "schedules", "--json")
    document = json.loads(output)
    assert (code, document["complete"]) == (0, True)
    assert {schedule["name"]: schedule["value"] for schedule in document["schedules"]}["s3"] == "s3"
    assert all(schedule["next"] for schedule in document["schedules"] if schedule["enabled"])
    code, output, _ = await faust(worker, "schedules")
    assert (code, "disabled" in output) == (0, True)
    code, output, _ = await faust(worker, "schedules", "often")
    runs = re.findall(r"^(\S+)\+00:00  ~schedule/often/", output, re.MULTILINE)
    assert (code, runs) == (0, sorted(runs, reverse=True))
    assert len(runs) > 2
    code, _, errors = await faust(worker, "schedules", "ofen")
    assert (code, "unknown schedule 'ofen'; did you mean 'often'?" in errors) == (1, True)
