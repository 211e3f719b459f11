"""Step 4 of :mod:`marq.consumer.receiver`: messages that were acquired go to handlers and waiting calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from marq.consumer.acquisition import Acquisition
from marq.consumer.cycles import Taking
from marq.consumer.starts import is_suspect, runs_apart
from marq.leases.held import HeldBatch
from marq.leases.message import Message
from marq.leases.receiver_settings import ReceiverSettings
from marq.leases.settlement import put_back
from marq.settings.queue import AT_MOST_ONCE
from marq.wire.names import EXPIRED_HEADER

if TYPE_CHECKING:
    from marq.consumer.ordered_receiving import Run
    from marq.consumer.receiver import Receiver

log = logging.getLogger("marq")


class Deliveries:
    """The deliveries of one receiver."""

    def __init__(self, receiver: Receiver, settings: ReceiverSettings, clock: Callable[[], float]) -> None:
        self._receiver = receiver
        self._settings = settings
        self._clock = clock

    def deliver(self, taking: Taking, sent_s: float) -> None:
        """Deliver what a cycle has acquired; leases begin at ``sent_s``, which is before their ACQUIRE was sent."""
        ordered = [each for each in taking.acquisitions if each.lines is not None]
        if ordered or taking.readings:
            self._receiver.ordering.add([(each, self._hold(each, sent_s)) for each in ordered], taking.readings)
        now_s = self._clock()
        for each in taking.acquisitions:
            if each.lines is not None or not each.messages:
                continue
            if now_s >= sent_s + each.lease_ms / 1000:
                # The offsets are committed, so they are not read again: the tracker redelivers them.
                log.warning("the lease expired before the messages were acquired, they will be redelivered: %s", each)
            else:
                held, records = self._hold(each, sent_s), each.messages
                if self._settings.queue(held.queue).delivery == AT_MOST_ONCE:
                    held.at_most_once, held.starts = True, self._receiver.starts
                self._buffer(held, records.offsets, records.values)

    def release_ordered(self, taking: Taking, sent_s: float) -> None:
        """Release messages of ordered queues that a failed cycle may have acquired; their attempts do not count.

        The next reader finds them open, even if their offsets are not committed. In other queues, the next reader reads
        messages with uncommitted offsets again and takes over their leases. After a RELEASE, it would deliver them
        twice.
        """
        for each in taking.acquisitions:
            if each.lines is not None:
                held = self._hold(each, sent_s)
                put_back([Message(held, offset, None) for offset in each.messages.offsets])

    def deliver_first(self, runs: Iterable[Run]) -> None:
        """Deliver messages that are the first of their lines."""
        for held, offsets, values in runs:
            self._buffer(held, offsets, values)

    def _hold(self, acquisition: Acquisition, sent_s: float) -> HeldBatch:
        queue, records, settings = acquisition.queue, acquisition.messages, self._settings
        holder, source, lease_s = acquisition.holder, acquisition.source, acquisition.lease_ms / 1000
        codec = settings.codecs.get(queue, settings.codec)
        acks = self._receiver.acks
        held = HeldBatch(acks, queue, source, holder, records, sent_s, lease_s, codec, acquisition.own_topic)
        held.lines, held.unseen = acquisition.lines, True
        if settings.prefetch and records.has_header(EXPIRED_HEADER):
            held.starts = self._receiver.starts
        self._receiver.gate.apply(held)
        self._receiver.renewal.add(held)
        return held

    def _buffer(self, held: HeldBatch, offsets: Sequence[int], values: Sequence[bytes | None]) -> None:
        """Buffer the messages that may be delivered now; the others count as in flight until they are released."""
        gate, prefetch, count = self._receiver.gate, self._receiver.prefetch, len(offsets)
        messages: Iterable[Message] = map(Message, repeat(held), offsets, values)
        if gate.restricts(held):
            messages = gate.admitted(held, list(messages))
            count = len(messages)
        if held.starts is None:
            prefetch.add(held.queue, messages, count, len(offsets))
            return
        attempts = self._settings.queue(held.queue).max_attempts
        suspects, others = list[tuple[Message, bool]](), list[Message]()
        for message in messages:
            if is_suspect(message):
                suspects.append((message, runs_apart(message, attempts)))
            else:
                others.append(message)
        prefetch.add(held.queue, others, len(others), len(offsets))
        prefetch.add_suspects(suspects)
