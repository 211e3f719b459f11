"""Kills while messages are delayed, retried, dead-lettered, redriven, or delivered at most once."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence

import marq
from lab.consumer import Point
from lab.faults.mix import Mix
from lab.faults.scenario import own_broker, scenario
from lab.program import RunError, Worker
from lab.proof.causes import EVERYBODY
from lab.stage import QUEUE, QUICK_BACKOFF, Stage
from marq.dead_letters.dead_letters import DeadLetters
from marq_worker.broker import EmbeddedBroker

#: Deliveries before, between and after faults.
SOME = 150
FEW = 60
#: Retries after a list of delays, after an exception's own delay, and a reject for another exception.
RETRIES = """backoff = [0.1, 0.4, 1]
errors = { TimeoutError = [0.7], ValueError = "reject" }
"""
BACKOFF = {"backoff": [1000, 2, 1000, False, [100, 400, 1000]]}
#: Lines for both queues: an at-most-once queue rejects messages after any exception, the other one after ValueError.
REJECTS = QUICK_BACKOFF + 'errors = { ValueError = "reject" }\n'
#: Rate of a redrive: slow enough for a kill during it.
LETTERS_IN_A_SECOND = 30
AGAIN_S = 0.5
QUEUE_DELAY_S = 1.5
#: Points at which consumers of an at-most-once queue die, and after how many passes.
SPENDING = {
    Point.AFTER_ACQUIRE: 3,
    Point.AFTER_COMMIT: 3,
    Point.BEFORE_SPEND: 3,
    Point.AFTER_SPEND: 3,
    Point.IN_HANDLER: 40,
    Point.BEFORE_ACK: 3,
}


async def all_at_random(stage: Stage, rounds: int, some: int) -> None:
    """Kill a consumer and the worker in each round; the worker keeps its data in the first round only."""
    chance = random.Random(stage.seed)
    stage.define(RETRIES, **BACKOFF)
    worker = await stage.worker()
    consumers = list(await asyncio.gather(*[stage.consumer("--manner=failing") for _ in range(2)]))
    mix = Mix(stage)
    mix.start()
    for turn in range(rounds):
        await stage.delivered_more(some)
        victim = consumers.pop(chance.randrange(len(consumers)))
        await stage.kill(victim)
        await stage.kill(worker)
        if turn:
            shutil.rmtree(worker.data)
        worker = await stage.worker(data=worker.data)
        consumers.append(await stage.consumer("--manner=failing"))
    await stage.delivered_more(some)
    await mix.stop()
    await stage.drain()


async def redrive(stage: Stage, *, killed: bool) -> None:
    """Redrive all dead letters; if ``killed``, kill and restart the worker meanwhile."""
    async with DeadLetters(stage.servers, prefix=stage.prefix) as letters:
        offsets_of: dict[str, list[int]] = defaultdict(list)
        for queue in stage.queues:
            async for letter in letters.peek(queue):
                offsets_of[f"{stage.settings.names.dead_letters}/{letter.partition}"].append(letter.offset)
        for source, offsets in offsets_of.items():
            stage.note("invoke", "redrive", process="redriver", source=source, offsets=offsets)
        redriving = asyncio.create_task(_redrive_all(letters, stage.queues))
        if killed:
            worker = stage.workers[-1]
            await stage.delivered_more(sum(map(len, offsets_of.values())) // 3)
            await stage.kill(worker)
            await stage.worker(data=worker.data)
        await stage.until(redriving.done, "all dead letters are redriven")
        await redriving
        for source, offsets in offsets_of.items():
            stage.note("ok", "redrive", process="redriver", source=source, offsets=offsets)


async def _redrive_all(letters: DeadLetters, queues: Sequence[str]) -> None:
    while True:
        try:
            for queue in queues:
                await letters.redrive(queue, rate=LETTERS_IN_A_SECOND)
        except marq.BrokerUnavailable:
            await asyncio.sleep(AGAIN_S)
        else:
            return


@scenario(
    "mixed-at-random",
    "random delays, cancels, reschedules, deduplication ids, retries and rejects; kill -9 of a consumer and of the"
    " worker; then a redrive of all dead letters",
    "some redeliveries are late; no message is early, no cancelled one is delivered, no id is accepted twice, each dead"
    " letter is redriven once",
    quick=True,
)
async def in_short(stage: Stage, _: object) -> None:
    await all_at_random(stage, 1, FEW)
    await redrive(stage, killed=False)


@scenario(
    "delays-under-kills",
    "the same for longer: two consumers killed, the worker killed twice (once without its data) and again during"
    " the redrive",
    "the same",
)
async def under_kills(stage: Stage, _: object) -> None:
    await all_at_random(stage, 2, SOME)
    for consumer in stage.consumers:
        if consumer.running:
            await stage.stop(consumer)
    # It handles all redriven messages successfully.
    await stage.consumer("--manner=patient")
    await redrive(stage, killed=True)


@scenario(
    "delayed-broker-killed",
    "kill -9 of the only broker, started again at once, twice, while messages are delayed",
    "everything waits; messages that became due meanwhile are late",
    own_broker,
)
async def broker_killed(stage: Stage, broker: EmbeddedBroker) -> None:
    await stage.worker()
    await stage.consumer()
    mix = Mix(stage, delayed=1.0)
    mix.start()
    for _ in range(2):
        await stage.delivered_more(SOME)
        with stage.fault("cut", EVERYBODY):
            broker.kill()
            await asyncio.to_thread(broker.start)
    await stage.delivered_more(SOME)
    await mix.stop()


@scenario(
    "queue-with-delay-killed",
    "kill -9 of consumers and of the worker of a queue with the setting `delay`",
    "nothing is delivered early; records that were not yet delayed are read again",
)
async def queue_delays(stage: Stage, _: object) -> None:
    """Only the queue's setting delays these records, which any producer may write."""
    stage.define(own=f"delay = {QUEUE_DELAY_S}\n", delay_ms=int(QUEUE_DELAY_S * 1000))
    worker = await stage.worker()
    stage.load(rate=100)
    consumers = [await stage.consumer(), await stage.consumer()]
    for consumer in consumers:
        await stage.delivered_more(SOME)
        await stage.kill(consumer)
        await stage.consumer()
    await stage.kill(worker)
    await stage.worker(data=worker.data)
    await stage.delivered_more(SOME)


@scenario(
    "at-most-once-killed",
    "kill -9 of consumers of an at-most-once queue, before and after each of their steps",
    "undelivered messages return to the queue; delivered ones are abandoned and counted",
)
async def at_most_once(stage: Stage, _: object) -> None:
    stage.define(REJECTS, own='delivery = "at-most-once"\n', delivery="at-most-once")
    worker = await stage.worker()
    mix = Mix(stage, delayed=0.0, with_ids=0.0)
    mix.start()
    await stage.consumer("--manner=rejecting")
    for point, after in SPENDING.items():
        victim = await stage.consumer("--manner=rejecting", f"--die-at={point}", f"--die-after={after}")
        await stage.dead(victim)
        await stage.delivered_more(FEW)
    await mix.stop()
    await stage.drain()
    counts = await counted(stage, worker)
    sent = stage.accepted_by[QUEUE]
    lost = sent - counts["acked"] - counts["dead_lettered"]
    if not 0 < counts["abandoned"] == lost:
        raise RunError(f"{sent} sent, {lost} neither done nor dead, but the worker counts {counts}")


async def counted(stage: Stage, worker: Worker) -> dict[str, float]:
    """Return a worker's counts of the queue without ordering; a busy worker may not answer at once."""
    counts: dict[str, float] = {}

    async def answered() -> bool:
        counts.update(await asyncio.to_thread(worker.row, QUEUE, "worker"))
        return bool(counts)

    await stage.until(answered, f"{worker.name} returns its counts")
    return counts


@scenario(
    "at-most-once-worker-killed",
    "kill -9 of a consumer of such a queue before DISPATCH; then of the worker after it sent the redeliveries and"
    " before it committed them, twice",
    "the transaction is aborted; no consumer sees its redeliveries, and the next owner sends them",
)
async def at_most_once_and_the_worker(stage: Stage, _: object) -> None:
    """A worker dies before it commits redeliveries of messages that no handler has seen; the next one sends them."""
    stage.define(REJECTS, own='delivery = "at-most-once"\n', delivery="at-most-once")
    worker = await stage.worker("--die-in-transaction=1")
    mix = Mix(stage, delayed=0.0)
    mix.start()
    await stage.consumer("--manner=patient")
    for options in (["--die-in-transaction=1"], []):
        victim = await stage.consumer("--manner=patient", f"--die-at={Point.BEFORE_SPEND}", "--die-after=3")
        await stage.dead(victim)
        await stage.dead(worker)
        worker = await stage.worker(*options, data=worker.data)
        await stage.delivered_more(FEW)
    await mix.stop()
