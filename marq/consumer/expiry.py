"""Which messages have expired, as a consumer sees it.

A consumer never ends a message by a clock, because only the log's clock counts. It leaves a message that seems to have
expired with the tracker: in the ACQUIRE if it can tell by then (:mod:`marq.consumer.acquire`), else by a release that
does not count. The tracker ends the message, or delivers it if it has not expired by the log's clock.

The consumer uses the brokers' clock, as the answers to its writes show it. Before the first answer it knows no time. So
the first messages of a process are checked when they have been acquired, before they are delivered.
"""

from __future__ import annotations

from collections.abc import Sequence

from marq.kafka.records import Records
from marq.settings.queue import QueueSettings
from marq.wire.markers import Headers
from marq.wire.names import EXPIRES_AT_HEADER
from marq.wire.record_headers import expires_at_ms, is_redelivery

#: For how long a redelivery counts as not expired: the tracker has checked it when it sent it. If the two clocks differ
#: after a jump, the message would go back and forth otherwise.
CHECKED_MS = 1_000


def may_expire(messages: Records, rules: QueueSettings) -> bool:
    """Return whether some of a queue's messages may expire."""
    return rules.expires_after_ms is not None or messages.has_header(EXPIRES_AT_HEADER)


def expired(messages: Records, rules: QueueSettings, now_ms: int | None) -> Sequence[int]:
    """Return the indexes of messages that seem to have expired at ``now_ms``, the brokers' time; none if it is None."""
    if now_ms is None or not may_expire(messages, rules):
        return ()
    after_ms = rules.expires_after_ms
    if messages.headers is None and after_ms is not None:
        before_ms = now_ms - after_ms - rules.delay_ms
        return [index for index, timestamp_ms in enumerate(messages.timestamps) if timestamp_ms <= before_ms]
    return [
        index for index, record in enumerate(messages) if has_expired(record.timestamp, record.headers, rules, now_ms)
    ]


def has_expired(timestamp_ms: int, headers: Headers, rules: QueueSettings, now_ms: int) -> bool:
    """Return whether one message seems to have expired."""
    expires_ms = expires_at_ms(
        timestamp_ms, headers, delay_ms=rules.delay_ms, expires_after_ms=rules.expires_after_ms
    )  # fmt: skip
    if expires_ms is None or now_ms < expires_ms:
        return False
    return now_ms - timestamp_ms >= CHECKED_MS or not is_redelivery(headers)
