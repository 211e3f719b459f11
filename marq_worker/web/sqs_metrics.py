"""Metrics of an SQS endpoint; for a worker without the role ``sqs`` they have no values."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping
from typing import Any

#: Operations on messages: the count's label, and the member of the answer that lists several.
_MESSAGES = {
    "SendMessage": ("sent", None),
    "SendMessageBatch": ("sent", "Successful"),
    "ReceiveMessage": ("received", "Messages"),
    "DeleteMessage": ("deleted", None),
    "DeleteMessageBatch": ("deleted", "Successful"),
}
_OK, _HUNG_UP, _UNEXPECTED = "OK", "HungUp", "InternalFailure"


class CallMetrics:
    """Counts the calls of an endpoint's clients, by operation and error, and messages by what was done with them."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.messages: Counter[str] = Counter()
        self.polls = 0

    async def measured(self, operation: str, answering: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Await the answer of a call, and count the call."""
        began_s, code = time.monotonic(), _UNEXPECTED
        polls = operation == "ReceiveMessage"
        self.polls += polls
        try:
            answer = await answering
            code = _OK
            if operation in _MESSAGES:
                what, member = _MESSAGES[operation]
                self.messages[what] += 1 if member is None else len(answer.get(member, ()))
            return answer
        except asyncio.CancelledError:
            code = _HUNG_UP
            raise
        except Exception as error:
            # The shape of an SqsError.
            code = getattr(error, "shape", _UNEXPECTED)
            raise
        finally:
            self.polls -= polls
            self.calls[operation, code] += 1
            self.seconds[operation] += time.monotonic() - began_s
