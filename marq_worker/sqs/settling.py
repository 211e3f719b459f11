"""Deletes and releases deliveries, and moves the ends of their visibility timeouts.

In standard queues that takes only a marker; for FIFO queues, see :mod:`marq_worker.sqs.fifo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from marq.client.message_token import Token
from marq_worker.sqs.characters import is_fifo
from marq_worker.sqs.polling import TokenSettler


class DeliveryHandle(Protocol):
    """One delivery of a message; ``url`` is the address of the endpoint that keeps it, empty if none does."""

    @property
    def token(self) -> Token: ...
    @property
    def attempt(self) -> int: ...
    @property
    def url(self) -> str: ...


class Settler(Protocol):
    """Settles deliveries. Calls return when the outcome is durable; they raise MarqError if that is unknown."""

    async def ack(self, deliveries: Sequence[DeliveryHandle]) -> None:
        """Delete messages."""

    async def renew(self, deliveries: Sequence[DeliveryHandle], lease_ms: int) -> None:
        """Hide messages for this long from now on."""

    async def release(self, deliveries: Sequence[DeliveryHandle], *, counted: bool = True) -> None:
        """Make messages available; with ``counted=False`` no client has seen them."""


async def change_visibility(settler: Settler, deliveries: Sequence[DeliveryHandle], visibility_s: int) -> None:
    """Hide messages for this long from now on; 0 makes them available. Same errors as the settler."""
    if visibility_s:
        await settler.renew(deliveries, visibility_s * 1000)
    else:
        await settler.release(deliveries)


class ByToken:
    """Settles deliveries of standard queues."""

    def __init__(self, settler: TokenSettler) -> None:
        self._settler = settler

    async def ack(self, deliveries: Sequence[DeliveryHandle]) -> None:
        await self._settler.ack([delivery.token for delivery in deliveries])

    async def renew(self, deliveries: Sequence[DeliveryHandle], lease_ms: int) -> None:
        await self._settler.renew([(delivery.token, lease_ms) for delivery in deliveries])

    async def release(self, deliveries: Sequence[DeliveryHandle], *, counted: bool = True) -> None:
        await self._settler.release([delivery.token for delivery in deliveries], counted=counted)


class Settlers(NamedTuple):
    """The settlers of both types of queues."""

    standard: Settler
    fifo: Settler

    def of(self, queue: str) -> Settler:
        return self.fifo if is_fifo(queue) else self.standard
