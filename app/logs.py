"""What a worker's log looks like, and what never gets into it.

Our own lines name things as ``queue=emails partition=3``; as JSON these are fields of their own. Payloads and passwords
are in none of them. aiokafka's at the level debug have both: its requests, as they are sent.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

from aiohttp.http_exceptions import HttpProcessingError

from config.settings import LogFormat

#: They write whole requests at the level debug: messages, and the password of a login.
TELLTALES = ("aiokafka.conn", "aiokafka.producer.producer")
#: What our lines name; anything else with an equals sign is text.
_FIELDS = (
    "queue", "group", "topic", "id", "partition", "offset", "offsets", "first_offset", "attempt", "messages", "batches",
    "leases", "decided", "released", "pause", "status", "visitor", "address", "path", "action", "seconds",
    "attempts", "error",
)  # fmt: skip
#: The error is the rest of the line.
_FIELD = re.compile(rf"(?<!\S)({'|'.join(_FIELDS[:-1])})=(\S+)|(?<!\S)(error)=(.+)\Z", re.DOTALL)


class NoRequests(logging.Filter):
    """Of what reaches the web server and is no HTTP request: one line, without the bytes, which may be anything."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; return whether it is logged."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        who = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "what came from %s is no HTTP request: %s", (who, type(error).__name__)
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)


_NO_REQUESTS = NoRequests()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, and the fields that it names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = record.getMessage()
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.name.partition(".")[0] == "marq":
            for name, value, last, rest in _FIELD.findall(message):
                found[name or last] = _number(value) if name else rest
        found |= _trace()
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


def shape(root: logging.Logger, form: LogFormat) -> None:
    """Let all handlers of a logger write so, and nobody write what is not for logs."""
    for name in TELLTALES:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_NO_REQUESTS)
    if form is LogFormat.JSON:
        for handler in root.handlers:
            handler.setFormatter(JsonFormatter())


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _trace() -> dict[str, str]:
    """Return the span that is current where the line is written, where OpenTelemetry is in use."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}
