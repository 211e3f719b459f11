"""The text of a RELEASE or REJECT: an error or reason, and after it, separated by a control character, a traceback.

Only the text of a message's last attempt has a traceback: it goes into the dead letter. Readers that show or compare
errors take :func:`error_of`, so that a traceback never makes two equal errors differ.
"""

from __future__ import annotations

#: Between an error and its traceback (U+001E, "record separator").
SEPARATOR = "\x1e"
#: Bytes of an error or reason that travel with a marker; longer ones are cut.
MAX_TEXT_BYTES = 1024
#: Bytes of a traceback; of a longer one, the end is kept, because it shows where the error was raised.
MAX_TRACEBACK_BYTES = 4096
#: Begins a traceback that was cut.
_CUT = "…\n"


def with_traceback(error: str, traceback: str) -> str:
    """Return an error followed by its traceback, if there is one."""
    return plain_error(error) + (f"{SEPARATOR}{cut_traceback(traceback)}" if traceback else "")


def plain_error(error: str) -> str:
    """Return an error without a separator, after which the rest would be taken for a traceback."""
    return error.replace(SEPARATOR, " ") if SEPARATOR in error else error


def error_of(text: str) -> str:
    """Return the error in a text."""
    return text.partition(SEPARATOR)[0]


def traceback_of(text: str) -> str:
    """Return the traceback in a text; empty if it has none."""
    return text.partition(SEPARATOR)[2]


def cut_text(text: str) -> bytes:
    """Return a text as UTF-8, with its error and its traceback cut to their limits, never within a character."""
    error, separator, traceback = text.partition(SEPARATOR)
    head = error.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return head + (separator + cut_traceback(traceback)).encode() if separator else head


def most_bytes(text: str) -> int:
    """Return an upper limit for the bytes of :func:`cut_text`, without the work of encoding."""
    error, separator, traceback = text.partition(SEPARATOR)
    return min(MAX_TEXT_BYTES, 4 * len(error)) + len(separator) + min(MAX_TRACEBACK_BYTES, 4 * len(traceback))


def cut_traceback(traceback: str) -> str:
    """Return at most :data:`MAX_TRACEBACK_BYTES` of a traceback, from its end, in whole lines if possible."""
    encoded = traceback.encode("utf-8", "replace")
    if len(encoded) <= MAX_TRACEBACK_BYTES:
        return encoded.decode()
    end = encoded[len(_CUT.encode()) - MAX_TRACEBACK_BYTES :].decode("utf-8", "ignore")
    return _CUT + (end.partition("\n")[2] or end)
