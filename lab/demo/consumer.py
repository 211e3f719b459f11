"""One consumer process of the demo: ``python -m lab.demo.consumer NAME HISTORY [options of the demo]``.

It serves all queues, each with a `marq.Consumer` of its own, and writes a history (lab/proof/history.py). It forgets
some messages: they stay leased until ``max_lease``, then the tracker redelivers them. Some handlers raise.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import marq
from lab.demo.plan import Conduct, Plan, read_plan
from lab.handling import Teller, fail
from lab.recorder import Recorder, recorded_stalls

#: Messages of one receive, and how long it waits for the first.
RECEIVE_MESSAGES = 250
RECEIVE_SECONDS = 5.0


class Failure(Exception):
    """The error of a handler that fails."""


class Server:
    """Serves the queues of a plan."""

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self._plan = plan
        self._recorder = recorder
        self._teller = Teller(recorder.add)
        self._starting = plan.queues

    async def serve_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for queue in self._plan.queue_names:
                tasks.create_task(self._serve(queue))

    async def _serve(self, queue: str) -> None:
        lease = self._plan.lease_seconds
        async with marq.Consumer(queue, lease=lease, max_lease=lease) as consumer:
            self._starting -= 1
            if not self._starting:
                self._recorder.add("info", "ready")
            while True:
                messages = await consumer.receive(max_messages=RECEIVE_MESSAGES, wait=RECEIVE_SECONDS)
                await asyncio.gather(*map(self._handle, messages))

    async def _handle(self, message: marq.Message) -> None:
        number = self._plan.number(message.queue, message.value)
        conduct = Conduct.ACK if number is None else self._plan.conduct(number, message.attempt)
        if conduct is Conduct.FORGET:
            self._teller.forget(message)
            return
        # Recorded before the ack: a process that dies between the two has done the work.
        self._teller.deliver(message)
        if number is None:
            await self._teller.settle("reject", message, lambda: message.reject("the demo did not send this"))
        elif conduct is Conduct.FAIL:
            error = Failure(f"message {message.id} fails at attempt {message.attempt}")
            await self._teller.settle("release", message, lambda: fail(message, error))
        else:
            await self._teller.settle("ack", message, message.ack)


async def serve(plan: Plan, recorder: Recorder) -> None:
    """Serve until SIGTERM; then write the pending outcomes and leave the groups."""
    serving = asyncio.ensure_future(Server(plan, recorder).serve_all())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    async with recorded_stalls(recorder.process, recorder.add, plan.lease_seconds):
        await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


def main(arguments: Sequence[str]) -> int:
    name, history, *options = arguments
    try:
        asyncio.run(serve(read_plan(options), Recorder(name, Path(history))))
    except ExceptionGroup as group:
        known, unknown = group.split(marq.MarqError)
        if unknown is not None or known is None:
            raise
        print(f"error: {known.exceptions[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
