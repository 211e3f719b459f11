"""Errors with which a broker says that it has not written a record batch.

A broker checks a batch before it appends it. The answer depends only on the batch, its predecessors, the topic and the
clocks, so a repeated request gets the same one. After all other errors, such as a timeout, it is unknown whether the
batch was written. These errors say nothing about other batches, so a write of several batches cannot use them.
"""

from __future__ import annotations

from aiokafka import errors
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    InvalidMessageError,
    InvalidTimestampError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    PolicyViolationError,
    RecordListTooLargeError,
    UnsupportedForMessageFormatError,
)

from marq.wire.errors import Refused


class UnsupportedCompressionType(BrokerResponseError):  # type: ignore[misc]
    """The broker does not know the codec."""

    errno = 76
    message = "UNSUPPORTED_COMPRESSION_TYPE"


class InvalidRecord(BrokerResponseError):  # type: ignore[misc]
    """The topic does not accept a record of the batch."""

    errno = 87
    message = "INVALID_RECORD"


# aiokafka (0.14) does not know these codes, and would raise the same error as for -1, after which nothing is known.
for _error in (UnsupportedCompressionType, InvalidRecord):
    errors.kafka_errors.setdefault(_error.errno, _error)

_TOO_LARGE = "its batch is larger than the topic accepts (max.message.bytes): send smaller messages, or raise it"
_INVALID = "it has an invalid record: compacted topics accept no record without a key"
_REASONS: dict[type[BaseException], str] = {
    InvalidTimestampError: (
        "this machine's clock differs from the broker's by more than the topic accepts (message.timestamp.after.max.ms,"
        " message.timestamp.before.max.ms): set the clock"
    ),
    MessageSizeTooLargeError: _TOO_LARGE,
    RecordListTooLargeError: _TOO_LARGE,
    CorruptRecordException: _INVALID,
    InvalidMessageError: _INVALID,
    InvalidRecord: _INVALID,
    # If it had been written, the broker would call it a duplicate.
    OutOfOrderSequenceNumber: "it refused an earlier batch of the same partition: send them again",
    UnsupportedCompressionType: "it is too old for the compression: choose another one",
    InvalidTopicError: "the broker accepts no topic of this name: choose another one",
    PolicyViolationError: "a policy of the broker forbids it: ask the broker's operators",
    UnsupportedForMessageFormatError: "the topic's message.format.version is too old for headers: set 2.0 or newer",
}


def refusal(topic: str, error: BaseException) -> Refused | None:
    """Return the error for a batch that the broker refused, or None if it is unknown whether the batch was written."""
    reason = _REASONS.get(type(error))
    if reason is None:
        return None
    return Refused(f"topic {topic}: the broker refused the records, so nothing was sent: {reason} ({error})")
