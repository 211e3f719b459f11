"""Metrics of an SQS endpoint; for a worker without the role ``sqs`` they have no values."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
    """Counts the calls of an endpoint's clients."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._messages: Counter[str] = Counter()
        self._polls = 0

    async def measured(self, operation: str, answering: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Await the answer of a call, and count the call."""
        began_s, code = time.monotonic(), _UNEXPECTED
        polls = operation == "ReceiveMessage"
        self._polls += polls
        try:
            answer = await answering
            code = _OK
            if operation in _MESSAGES:
                what, member = _MESSAGES[operation]
                self._messages[what] += 1 if member is None else len(answer.get(member, ()))
            return answer
        except asyncio.CancelledError:
            code = _HUNG_UP
            raise
        except Exception as error:
            # The shape of an SqsError.
            code = getattr(error, "shape", _UNEXPECTED)
            raise
        finally:
            self._polls -= polls
            self._calls[operation, code] += 1
            self._seconds[operation] += time.monotonic() - began_s

    def families(self) -> Iterator[Metric]:
        """Return the metrics; may run in another thread."""
        calls = CounterMetricFamily("marq_sqs_calls", "Calls, by operation and error.", labels=["operation", "code"])
        for labels, count in list(self._calls.items()):
            calls.add_metric(labels, count)
        what = "Time until calls were answered; polls include the wait for messages."
        seconds = CounterMetricFamily("marq_sqs_call_seconds", what, labels=["operation"])
        for operation, total in list(self._seconds.items()):
            seconds.add_metric([operation], total)
        what = "Messages that clients have sent, received and deleted."
        messages = CounterMetricFamily("marq_sqs_messages", what, labels=["action"])
        for action, count in list(self._messages.items()):
            messages.add_metric([action], count)
        polls = GaugeMetricFamily("marq_sqs_polls", "Polls that are waiting for messages.")
        if self._calls or self._polls:
            polls.add_metric([], self._polls)
        yield from (calls, seconds, messages, polls)
