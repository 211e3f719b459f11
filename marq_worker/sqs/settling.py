"""Deletes and releases deliveries, and moves the ends of their visibility timeouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from marq.client.message_token import Token


class DeliveryHandle(Protocol):
    """One delivery of a message; ``url`` is the address of the endpoint that keeps it, empty if none does."""

    @property
    def token(self) -> Token: ...
    @property
    def attempt(self) -> int: ...
    @property
    def url(self) -> str: ...


class Settler(Protocol):
    """Settles deliveries. Calls return when the outcome is durable.

    They raise MarqError if that is unknown, and SqsError if the delivery of a kept message is over.
    """

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
