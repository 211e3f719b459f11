"""One consumer process of the demo: ``python -m demo.consumer JOURNAL [options of the demo]``.

It serves all queues, each with a `marq.Consumer` of its own. A message that it is to forget is simply left alone: it
stays leased until ``max_lease``, and then comes back to whoever asks. One that is to fail raises in its handler.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import marq
from demo.journal import Journal, What
from demo.plan import Conduct, Plan, read_plan

#: Messages of one receive, and how long it waits for the first.
RECEIVE_MESSAGES = 250
RECEIVE_SECONDS = 5.0


class Failure(Exception):
    """What a handler raises that fails."""


class Server:
    """Serves the queues of a plan and keeps the journal."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan = plan
        self._journal = journal
        self._starting = plan.queues

    async def serve_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for queue in self._plan.queue_names:
                tasks.create_task(self._serve(queue))

    async def _serve(self, queue: str) -> None:
        lease = self._plan.lease_seconds
        async with marq.Consumer(queue, lease=lease, max_lease=lease) as consumer:
            self._started()
            while True:
                messages = await consumer.receive(max_messages=RECEIVE_MESSAGES, wait=RECEIVE_SECONDS)
                taken = [(message, await self._take(message)) for message in messages]
                await consumer.flush()
                for message, number in taken:
                    if number is not None:
                        self._note(What.ACKED, message, number)

    def _started(self) -> None:
        self._starting -= 1
        if not self._starting:
            self._journal.note(What.READY)

    async def _take(self, message: marq.Message) -> int | None:
        """Return the number of a message that was handled and whose ack is queued; None of all others."""
        number = self._plan.number(message.queue, message.value)
        if number is None:
            self._note(What.STRANGE, message)
            await message.reject("the demo did not send this", wait=False)
            return None
        conduct = self._plan.conduct(number, message.attempt)
        if conduct is Conduct.FORGET:
            self._note(What.FORGOT, message, number)
            return None
        try:
            async with message:
                self._handle(message, number, conduct)
        except Failure:
            self._note(What.FAILED, message, number)
            return None
        return number

    def _handle(self, message: marq.Message, number: int, conduct: Conduct) -> None:
        if conduct is Conduct.FAIL:
            raise Failure(f"message {number} fails at attempt {message.attempt}")
        # Before the ack: a process that dies between the two has done the work and will be found to have done it.
        self._note(What.HANDLED, message, number)

    def _note(self, what: What, message: marq.Message, number: int = -1) -> None:
        self._journal.note(what, number, message.attempt, message.partition, message.offset)


async def serve(plan: Plan, journal: Journal) -> None:
    """Serve until SIGTERM; then write what was decided, and leave."""
    serving = asyncio.ensure_future(Server(plan, journal).serve_all())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


def main(arguments: Sequence[str]) -> int:
    plan = read_plan(arguments[1:])
    try:
        with Journal(Path(arguments[0])) as journal:
            asyncio.run(serve(plan, journal))
    except ExceptionGroup as group:
        known, unknown = group.split(marq.MarqError)
        if unknown is not None or known is None:
            raise
        print(f"error: {known.exceptions[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
