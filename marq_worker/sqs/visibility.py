"""Changes of visibility timeouts, and whether they are in time.

A marker of a lease that has ended has no effect, and its writer is not told. A receipt handle contains the original end
of its lease, by the brokers' clock. Until then a change is in time, unless another endpoint has shortened the lease.
Later, unless it has extended the lease itself, the endpoint asks the tracker first, which takes a tenth of a second.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from marq.client.message_token import Token
from marq.wire.errors import BrokerUnavailable
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.handles import Handle
from marq_worker.sqs.polling import LeaseLookup, TokenSettler

log = logging.getLogger("marq.sqs")

#: How long before the end of a lease the endpoint begins to ask: brokers' clocks differ, and a marker takes time.
MARGIN_MS = 5_000
#: How many changes to remember.
MAX_CHANGES = 20_000


class VisibilityChanges:
    """Changes visibility timeouts."""

    def __init__(self, settler: TokenSettler, questions: LeaseLookup) -> None:
        self._settler = settler
        self._questions = questions
        #: The ends of the leases that were changed here.
        self._ends: OrderedDict[Token, int] = OrderedDict()

    async def change(self, handle: Handle, visibility_s: int) -> None:
        """Let a lease end after this time; 0 releases the message.

        Raises:
            SqsError: the lease has ended.
            MarqError: it is unknown whether the lease was changed.
        """
        token = handle.token
        now_ms = self._settler.broker_ms()
        in_time = now_ms is not None and now_ms < self._ends.get(token, handle.until_ms) - MARGIN_MS
        if not in_time and not await self._is_held(token):
            raise SqsError("MessageNotInflight", "the visibility timeout of the message has ended, or it was deleted")
        if visibility_s:
            await self._settler.renew([(token, visibility_s * 1000)])
        else:
            await self._settler.release([token])
        # The write has set the clock.
        self._ends[token] = (self._settler.broker_ms() or 0) + visibility_s * 1000
        self._ends.move_to_end(token)
        if len(self._ends) > MAX_CHANGES:
            self._ends.popitem(last=False)

    async def _is_held(self, token: Token) -> bool:
        try:
            return await self._questions.is_in_flight(token)
        except BrokerUnavailable as error:
            # Change it: the marker counts if it is in time.
            log.warning("queue %r: unknown whether a message is in flight: %s", token.queue, error)
            return True
