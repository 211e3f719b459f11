"""Runs handlers over messages one by one: a fixed number of tasks that take message after message.

There is no task for each message: a coroutine handler runs in its worker's own task, a plain function in a thread. A
worker whose handler never waits for anything steps aside now and then, so that acks, renewals and heartbeats get
their turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from marq.codecs import Codec
from marq.crew import Crew
from marq.flow import Flow
from marq.handlers import Handler
from marq.message import Message
from marq.outbox import Outbox
from marq.shelf import Shelf

log = logging.getLogger("marq")

#: A worker steps aside after so many messages at most, or after so long.
MAX_BURST = 256
BURST_S = 0.005
#: Limits of the steps of a stop, so that it ends within 10 s whatever the broker does.
STOP_READING_S, STOP_OUTBOX_S, STOP_CLIENT_S = 1.0, 2.0, 1.0


class Workers(Crew[Message]):
    """``concurrency`` workers of a handler that takes one message."""

    def __init__(
        self,
        shelf: Shelf,
        outbox: Outbox,
        handler: Handler,
        concurrency: int,
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        # Twice as many as run, so that the next message is there when a handler is done.
        super().__init__(shelf, outbox, handler, concurrency, 2 * concurrency, codecs)
        #: The worker that began last.
        self._latest = -1

    def _messages(self, work: Message) -> Sequence[Message]:
        return [work]

    async def _work(self, index: int) -> None:
        shelf, outbox, handler = self._shelf, self._outbox, self._handler
        made, make = shelf.ready.made, shelf.ready.make
        current, interrupted, codecs = self._current, self._interrupted, self._codecs
        clock, pop = outbox.clock, made.popleft
        burst = 1
        while not (self._stopping or shelf.closed):
            if not (made or make()):
                outbox.flush_soon()
                await shelf.wait()
                continue
            begun_s = clock()
            left = burst
            self._latest = index
            while left and (made or make()) and not self._stopping:
                left -= 1
                message = pop()
                lease = message._lease
                if lease.expires_s <= clock():
                    continue
                # Right before the call, so that a crash abandons only messages that a handler was about to process.
                if lease.spending is not None:
                    # The former message is done: the end of its lease must not cancel this wait.
                    current[index] = None
                    if not await lease.spending.spend([message]):
                        continue
                if codecs:
                    lease.codec = codecs.get(lease.queue, lease.codec)
                current[index] = message
                try:
                    await handler(message)
                except BaseException as error:
                    self._failed(index, [message], error)
                else:
                    if interrupted:
                        self._resumed(index)
                    if not lease.decided or message._offset not in lease.decided:
                        # As Lease.ack, without the call.
                        lease.acked.append(message._offset)
                        if not lease.dirty:
                            outbox.touch(lease)
                        if lease.breaker is not None:
                            lease.breaker.succeeded([message])
            current[index] = None
            took_s = clock() - begun_s
            # Its handler has waited, and another worker began meanwhile: so all others had their turn, too.
            stepped_aside = burst == 1 and self._latest != index
            burst = min(burst * 2, MAX_BURST) if took_s < BURST_S else max(1, burst // 2)
            if not stepped_aside:
                await asyncio.sleep(0)


async def wind_down(flow: Flow, crews: Sequence[Crew[Any]], grace_s: float, *, release: bool) -> None:
    """End receiving: handlers may end within the grace, what was decided is written, the prefetch is given back."""
    for shelf in flow.distinct_shelves:
        shelf.close()
    await asyncio.gather(flow.stop_reading(STOP_READING_S), *[each.stop(grace_s) for each in crews])
    released = flow.give_back() if release else 0
    queues = ",".join(flow.shelves)
    if not await flow.stop(STOP_OUTBOX_S):
        log.warning("stopped before all outcomes were written: queue=%s; their leases will run out", queues)
    elif released:
        log.info("gave prefetched messages back: queue=%s messages=%d", queues, released)
