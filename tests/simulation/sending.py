"""How a consumer's markers reach the log: each batch has its own fate, and its client may or may not learn of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from marq.consumer import receiver
from marq.kafka import marker_writer
from marq.kafka.marker_writer import MarkerRecord
from marq.wire import marker_codec
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Ack, Acquire, Dispatch, MixedAcquire, Reject, Release, Renew, Resume, split
from tests.simulation.loop import give

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer
    from tests.simulation.swarm import Faults

#: The first byte of markers of a version that workers do not know before the faults have ended.
NEWER_VERSION = b"\x02"
Batch = Acquire | MixedAcquire | Ack | Release | Reject | Renew | Dispatch | Resume
#: How long a client waits for a write before it treats the outcome as unknown.
PATIENCE_MS = 300


class Sent(Enum):
    """What a client knows of a write."""

    OK = 1
    FAILED = 2
    UNKNOWN = 3


TYPES = {Sent.OK: "ok", Sent.FAILED: "fail", Sent.UNKNOWN: "unknown"}


class Encoded(bytes):
    """The bytes of a marker batch, and what their writer meant by them, because the oracle does not trust the codec."""

    about: Batch


def _encode(batch: Batch) -> Encoded:
    encoded = Encoded(marker_codec.encode(batch))
    encoded.about = batch
    return encoded


@contextmanager
def simulated_modules() -> Iterator[None]:
    """Let the shipped modules encode so that records keep their batches, and log nothing."""
    log = receiver.log
    disabled, log.disabled = log.disabled, True
    vars(marker_writer)["encode"] = _encode
    try:
        yield
    finally:
        log.disabled = disabled
        vars(marker_writer)["encode"] = marker_codec.encode


def _chances(faults: Faults, batch: Batch) -> tuple[float, float, float]:
    """Return the probabilities that the write of a batch fails, has an unknown outcome, or is slow."""
    if isinstance(batch, Acquire | MixedAcquire):
        return faults.acquire_failed, faults.acquire_unknown, faults.acquire_slow
    if isinstance(batch, Renew):
        return faults.renew_failed, faults.renew_unknown, faults.renew_slow
    return faults.marker_failed, faults.marker_unknown, faults.marker_slow


class Writer:
    """Writes the markers of a receiver, like :class:`marq.kafka.marker_writer.MarkerWriter`."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        if not records:
            return
        consumer, results = self._consumer, list[Sent]()
        answer, began_ms = consumer.loop.create_future(), consumer.monotonic_ms()

        def over(result: Sent) -> None:
            results.append(result)
            if len(results) == len(records):
                known = results[0] if len(set(results)) == 1 else Sent.UNKNOWN
                for _, value in records:
                    self._note(TYPES[known], value.about, took_ms=consumer.monotonic_ms() - began_ms)
                give(answer, known)

        for _, value in records:
            self._note("invoke", value.about)
            # A batch that is late or fails holds the others up.
            self._send(value.about, value, over, int(limit_s * 1000))
        if await answer is not Sent.OK:
            raise BrokerUnavailable("not known to be written")

    def _send(self, batch: Batch, data: bytes, over: Callable[[Sent], None], limit_ms: int) -> None:
        """Send a batch; it reaches the log after a while, even if its sender has died by then."""
        world, rng, loop = self._consumer.world, self._consumer.world.rng, self._consumer.loop
        failed, unknown, slow = _chances(world.faults, batch)
        world.stats["mixed_acquires"] += isinstance(batch, MixedAcquire)
        if world.hit(failed):
            loop.arrive(rng.randint(5, 50), over, Sent.FAILED)
            return
        travel_ms = rng.randint(1, 5)
        if isinstance(batch, Renew) and world.hit(world.faults.renew_paused):
            # The answer is there when the process goes on, so the process sees it before its time limit ends.
            travel_ms = limit_ms = rng.randint(20, 1_200)
            self._consumer.pause(travel_ms + 1)
        elif world.hit(slow):
            travel_ms = rng.randint(20, 1_200)
        result = Sent.OK
        if world.hit(unknown):
            result = Sent.UNKNOWN
            world.stats["markers_unknown"] += 1
        if world.hit(world.faults.newer_marker):
            # A client that is newer than the workers, which is the wrong order of an upgrade.
            data = NEWER_VERSION + data[1:]
            world.stats["newer_markers"] += 1
        world.schedule(travel_ms, self._append, batch, data)
        # A client waits for a limited time; a batch that it has given up may still arrive.
        waited_ms = min(travel_ms, PATIENCE_MS) if result is Sent.UNKNOWN else travel_ms
        if waited_ms > limit_ms:
            waited_ms, result = limit_ms, Sent.UNKNOWN
        loop.arrive(waited_ms + rng.randint(1, 3), over, result)

    def _append(self, batch: Batch, data: bytes) -> None:
        self._consumer.world.markers_of(batch.source).append(data, about=batch)

    def _note(self, type_: str, sent: Batch, **fields: Any) -> None:
        """Note the writes of the library: handlers note their outcomes themselves."""
        for batch in split(sent):
            self._note_batch(type_, batch, **fields)

    def _note_batch(self, type_: str, batch: Any, **fields: Any) -> None:
        if isinstance(batch, Acquire | Renew | Dispatch) or (isinstance(batch, Release) and not batch.counted):
            op = type(batch).__name__.lower()
            self._consumer.note(type_, op, batch.holder, batch.queue, batch.source, batch.offsets, **fields)
