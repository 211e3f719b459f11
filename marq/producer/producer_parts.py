"""The parts of a started producer, and the sends of several messages that need more than one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from marq.client.delivery_time import Expiry, When, with_expiry
from marq.client.message_checks import Content, Header
from marq.client.receipt import Receipt
from marq.producer.batches import Batcher
from marq.producer.deduplicated_sends import with_id
from marq.producer.delay_control import DelayControl
from marq.producer.delays import Delays
from marq.producer.ordered_sending import KeyedRoutes
from marq.producer.routes import Routes

#: The receipt of each message, None if unknown, and the first failure.
Outcome = tuple[list[Receipt | None], BaseException | None]


class MessageOptions(NamedTuple):
    """The delivery time, ordering key, deduplication id and expiry of a message."""

    due: When | None
    key: bytes | None
    own_id: bytes | None
    expires: Expiry | None = None

    @property
    def place(self) -> bytes | None:
        """Decides which tracker looks for duplicates; None for a message without an id."""
        return None if self.own_id is None else self.key or self.own_id


class ProducerParts(NamedTuple):
    """The parts of a started producer."""

    content: Content
    routes: Routes
    keyed_routes: KeyedRoutes
    batches: Batcher
    delays: Delays
    delay_control: DelayControl

    async def send_line(
        self, queue: str, items: list[Any], headers: list[Header], dues: Sequence[When] | None, key: bytes
    ) -> Outcome:
        """Send messages of one ordering key."""
        async with self.keyed_routes.turn([queue], key) as called_s:
            find = partial(self.keyed_routes.find, queue, key, headers, called_s)
            route, pairs = await find(delayed=bool(dues))
            self.content.check_many(queue, route.key, items, pairs)
            if dues and items:
                return await self.delays.send_many(queue, items, pairs, dues)
            return await self.batches.send_line(queue, items, find)

    async def send_once(
        self,
        queue: str,
        items: list[Any],
        headers: list[Header],
        dues: Sequence[When],
        key: bytes | None,
        ids: Sequence[bytes],
        expires: Expiry | None = None,
    ) -> Outcome:
        """Send messages that have deduplication ids."""
        async with self.keyed_routes.turn([] if key is None else [queue], key or b"") as called_s:
            if key is None:
                route = await self.routes.find(queue)
            else:
                route, headers = await self.keyed_routes.find(queue, key, headers, called_s, delayed=True)
            largest = with_expiry(with_id(headers, max(ids, key=len, default=None)), expires, None)
            self.content.check_many(queue, route.key, items, largest)
            sends = zip(items, ids, dues, strict=True)
            return await self.delays.send_each(
                queue,
                [(item, with_expiry(with_id(headers, own), expires, due), due, key or own) for item, own, due in sends],
            )
