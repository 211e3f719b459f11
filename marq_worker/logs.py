"""The format of a worker's log, and filters for what must never be logged.

Marq's own lines have details such as ``queue=emails partition=3``, which are fields in JSON, and never contain payloads
or passwords. aiokafka's debug lines contain both, because they show its requests.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

from aiohttp.http_exceptions import HttpProcessingError

from marq_worker.config.settings import LogFormat

#: Loggers that log whole requests at debug level, with messages and the password of a login.
TELLTALES = ("aiokafka.conn", "aiokafka.producer.producer")
#: Loggers whose lines say how a worker works inside. Our own services are among them: Faust logs under their modules'
#: names, and we under "marq".
FOREIGN = ("faust", "mode", "aiokafka", "aiohttp", "marq_worker")
#: The logger of aiokafka's group members.
COORDINATOR = "aiokafka.consumer.group_coordinator"
#: Field names in our log lines; anything else with an equals sign is text.
_FIELDS = (
    "queue", "group", "topic", "id", "partition", "offset", "offsets", "first_offset", "attempt", "messages", "batches",
    "leases", "decided", "released", "pause", "status", "visitor", "address", "path", "action", "seconds",
    "attempts", "error",
)  # fmt: skip
#: The error takes the rest of the line.
_FIELD = re.compile(rf"(?<!\S)({'|'.join(_FIELDS[:-1])})=(\S+)|(?<!\S)(error)=(.+)\Z", re.DOTALL)


class NoRequests(logging.Filter):
    """Reduces errors about input that is not HTTP to one line, without its bytes."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        address = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "request from %s is not valid HTTP: %s", (address, type(error).__name__)
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)


_NO_REQUESTS = NoRequests()


class NoRebalances(logging.Filter):
    """Leaves out aiokafka's warning about a rebalance: every worker that starts or stops causes one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).endswith("because it is rebalancing")


_NO_REBALANCES = NoRebalances()


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time`` (UTC), ``level``, ``logger``, ``message``, and the named fields."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.name.partition(".")[0] == "marq":
            for name, value, last, rest in _FIELD.findall(message):
                document[name or last] = _number(value) if name else rest
            # Fields that a line has in other words.
            document |= getattr(record, "marq_fields", {})
        document |= _trace()
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


def shape(root: logging.Logger, form: LogFormat) -> None:
    """Set the format of all handlers of a logger, and keep out what must not be logged."""
    for name in TELLTALES:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_NO_REQUESTS)
    if form is LogFormat.JSON:
        for handler in root.handlers:
            handler.setFormatter(JsonFormatter())


def hide_faust() -> None:
    """Hide rebalances, and lines below WARNING of Faust, aiokafka and the services that Faust starts and stops."""
    # Those that `shape` gave a level of their own, too.
    for name in (*FOREIGN, *TELLTALES):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger(COORDINATOR).addFilter(_NO_REBALANCES)


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _trace() -> dict[str, str]:
    """Return the current OpenTelemetry span, if any."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}
