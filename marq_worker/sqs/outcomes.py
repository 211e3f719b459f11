"""Outcomes of deliveries: which messages to delete, to hide and to release, wherever they are.

A marker is enough for a message that no endpoint keeps. The others are settled by the endpoint that keeps them
(:mod:`marq_worker.sqs.fifo`); its address is in the delivery and in its receipt handle.

If that endpoint is gone, or its partition has moved, the outcome is written by token after a tracker has confirmed that
this delivery is still in flight. An endpoint that reads the partition later learns of it from the tracker. Without this
check, a late deletion could end the next delivery of the message, while another client works on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from marq.client import message_token
from marq.client.message_token import Token
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.handles import Handle
from marq_worker.sqs.peers import Peers
from marq_worker.sqs.polling import LeaseLookup, TokenSettler

if TYPE_CHECKING:
    from marq_worker.sqs.receiving import QueueReceiver

ACK, RENEW, RELEASE = "ack", "renew", "release"
Deliveries = Sequence[SqsDelivery | Handle]


class SettleRequest(NamedTuple):
    """The outcome that a client wants for one delivery of a message.

    ``lease_ms`` is for RENEW; a RELEASE is not ``counted`` if no client has seen the message.
    """

    token: Token
    attempt: int
    action: str
    lease_ms: int = 0
    counted: bool = True

    def document(self) -> dict[str, Any]:
        """Return the outcome for another endpoint, as JSON."""
        return {**self._asdict(), "token": message_token.encode(self.token)}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> SettleRequest:
        """Read what :meth:`document` returned. Raises ValueError, KeyError or TypeError."""
        return cls(**{**document, "token": message_token.decode(document["token"])})


#: An outcome for another endpoint, and the future of whether that endpoint holds the message.
Pending = tuple[SettleRequest, asyncio.Future[bool]]


class Outcomes:
    """Settles deliveries. Calls return when the outcome is durable.

    They raise MarqError if that is unknown, and SqsError if the delivery of a kept message is over.

    Args:
        url: the address of this endpoint.
        receiver: returns the receiver of a queue that is polled here, or None.
    """

    def __init__(
        self,
        url: str,
        settler: TokenSettler,
        questions: LeaseLookup,
        peers: Peers,
        receiver: Callable[[str], QueueReceiver | None],
    ) -> None:
        self._url = url
        self._settler = settler
        self._questions = questions
        self._peers = peers
        self._receiver = receiver
        #: Outcomes for other endpoints; those that arrive during a request share the next one.
        self._pending: dict[str, list[Pending]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def ack(self, deliveries: Deliveries) -> None:
        """Delete messages."""
        await self._settle(deliveries, ACK)

    async def renew(self, deliveries: Deliveries, lease_ms: int) -> None:
        """Hide messages for this long from now on."""
        await self._settle(deliveries, RENEW, lease_ms)

    async def release(self, deliveries: Deliveries, *, counted: bool = True) -> None:
        """Make messages available; with ``counted=False`` no client has seen them."""
        await self._settle(deliveries, RELEASE, counted=counted)

    async def stop(self) -> None:
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)
        for pending in self._pending.values():
            _answer(pending, [])
        self._pending.clear()

    async def _settle(self, deliveries: Deliveries, action: str, lease_ms: int = 0, *, counted: bool = True) -> None:
        if tokens := [delivery.token for delivery in deliveries if not delivery.url]:
            await self._write(tokens, action, lease_ms, counted=counted)
        kept = [
            self._settle_kept(delivery.url, SettleRequest(delivery.token, delivery.attempt, action, lease_ms, counted))
            for delivery in deliveries
            if delivery.url
        ]
        for result in await asyncio.gather(*kept, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _write(self, tokens: Sequence[Token], action: str, lease_ms: int, *, counted: bool) -> None:
        """Settle messages by their tokens."""
        match action:
            case "ack":
                await self._settler.ack(tokens)
            case "renew":
                await self._settler.renew([(token, lease_ms) for token in tokens])
            case _:
                await self._settler.release(tokens, counted=counted)

    async def _settle_kept(self, url: str, outcome: SettleRequest) -> None:
        if url == self._url:
            held = await self.settle_here(outcome)
        else:
            held = await self._settle_there(url, outcome)
        if not held:
            await self._settle_by_token(outcome)

    async def settle_here(self, outcome: SettleRequest) -> bool:
        """Settle a message that this endpoint holds; return False if it does not hold this delivery."""
        receiver = self._receiver(outcome.token.queue)
        return receiver is not None and await receiver.settle(outcome)

    async def _settle_there(self, url: str, outcome: SettleRequest) -> bool:
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(url, []).append((outcome, held))
        if url not in self._sending:
            self._sending[url] = asyncio.create_task(self._send(url), name="marq-sqs-outcomes")
        return await held

    async def _send(self, url: str) -> None:
        """Send the outcomes for another endpoint, one request at a time."""
        try:
            while pending := self._pending.pop(url, None):
                results: Sequence[bool] = []
                try:
                    results = await self._peers.settle(url, [outcome.document() for outcome, _ in pending])
                finally:
                    _answer(pending, results)
        finally:
            del self._sending[url]

    async def _settle_by_token(self, outcome: SettleRequest) -> None:
        """Settle a message whose endpoint no longer holds it, if this delivery is still in flight."""
        lease = await self._questions.ask(outcome.token)
        if not lease.state and (outcome.action == ACK or not outcome.counted):
            # The message has ended already; deleting it twice is not an error.
            return
        if not lease.is_in_flight or lease.attempt != outcome.attempt or not lease.left_ms:
            raise SqsError(
                "InvalidParameterValue" if outcome.action == ACK else "MessageNotInflight",
                "the receipt handle has expired: the visibility timeout of this delivery is over",
            )
        await self._write([outcome.token], outcome.action, outcome.lease_ms, counted=outcome.counted)


def _answer(pending: Sequence[Pending], results: Sequence[bool]) -> None:
    """Resolve the futures; an outcome without a result counts as not held."""
    for number, (_, held) in enumerate(pending):
        if not held.done():
            held.set_result(number < len(results) and results[number])


async def change_visibility(outcomes: Outcomes, deliveries: Deliveries, visibility_s: int) -> None:
    """Hide messages for this long from now on; 0 makes them available. Same errors as :class:`Outcomes`."""
    if visibility_s:
        await outcomes.renew(deliveries, visibility_s * 1000)
    else:
        await outcomes.release(deliveries)
