"""All public errors, by cause."""

from __future__ import annotations

from collections.abc import Callable


class MarqError(Exception):
    """Base class of all errors that marq raises."""


class ConfigError(MarqError):
    """A name, a setting or the cluster's configuration is wrong; the text says what to change."""


class UnknownQueue(ConfigError):
    """A queue is unknown, so its name may be mistyped. ``suggestion`` is the closest known name, if any."""

    def __init__(self, queue: str, suggestion: str | None, advice: str = "") -> None:
        self.queue, self.suggestion = queue, suggestion
        self.finding = f"queue {queue!r} is unknown: it has no definition, no consumer and no messages."
        if suggestion is not None:
            self.finding += f" Did you mean {suggestion!r}?"
        super().__init__(f"{self.finding} {advice}".rstrip())


class LeaseLost(MarqError):
    """The lease expired before the call: another consumer may have received the message."""


class MessageTooLarge(MarqError):
    """The message exceeds the broker's size limit; nothing was sent."""


class BrokerUnavailable(MarqError):
    """The broker did not answer in time, or refused; it is unknown whether the call took effect."""


class Forbidden(ConfigError, BrokerUnavailable):
    """The broker denies a permission; the text names it and the command that grants it."""


class Refused(BrokerUnavailable):
    """The broker refused records, so nothing was sent; the text says why and what to do."""


class CorruptMarker(MarqError):
    """Bytes in the markers topic that are not a marker batch."""


class UnknownVersion(CorruptMarker):
    """A marker batch written by a newer marq: its partition must wait for a newer tracker."""


def reason_of(error: BaseException) -> str:
    """Return the text of an exception, or its class if it has none."""
    return str(error) or type(error).__name__


def error_text(error: object, convert: Callable[[object], str] = str) -> str:
    """Return an exception as text; a user's class may raise anything while it is converted."""
    try:
        return convert(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "<unprintable>"
