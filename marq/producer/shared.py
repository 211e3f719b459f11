"""A producer for the many callers of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from marq.client.receipt import Receipt
from marq.client.send_options import Header
from marq.producer.producer import Producer
from marq.wire.errors import MarqError

#: How long a batch waits for messages of other calls while batches are on their way.
LINGER_S = 0.005


class SharedProducer(Producer):
    """A producer whose batches wait some milliseconds for other calls, if there are any."""

    _linger_s = LINGER_S

    async def send_each(
        self, queue: str, messages: Sequence[tuple[bytes, Sequence[Header]]]
    ) -> list[Receipt | MarqError]:
        """Send messages with checked headers of their own; return each one's receipt, or why it was not confirmed.

        Same errors as :meth:`send` if none was sent.
        """
        running = self._started()
        route = running.routes.known.get(queue) or await running.routes.find(queue)
        posts: list[tuple[int, asyncio.Future[int]] | MarqError] = []
        for value, headers in messages:
            try:
                running.content.check(queue, route.key, value, headers)
                posts.append(running.batches.post(route, value, list(headers)))
            except MarqError as refused:
                posts.append(refused)
        await asyncio.gather(*[post[1] for post in posts if isinstance(post, tuple)], return_exceptions=True)
        receipts: list[Receipt | MarqError] = []
        for post in posts:
            if isinstance(post, MarqError):
                receipts.append(post)
                continue
            partition, future = post
            try:
                receipts.append(Receipt(queue, route.cursor.topic, partition, future.result()))
            except MarqError as error:
                receipts.append(error)
        return receipts
