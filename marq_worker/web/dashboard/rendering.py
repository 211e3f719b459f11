"""Renders pages from templates: everything is escaped, and pages contain no inline scripts or styles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from marq.settings.combinations import ORIGINS
from marq_worker.readable import given_up

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
#: Placeholder for unknown values.
_UNKNOWN = "\N{EN DASH}"
_SECONDS = "%Y-%m-%d %H:%M:%S"


def environment() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    named = (number, rate, age, short, milliseconds, due, moment, ago, memory, load, path, setting, given_up)
    templates.filters.update({function.__name__: function for function in named})
    templates.filters.update(query=urlencode, origin=lambda layer: ORIGINS.get(layer, layer))
    templates.globals["version"] = _version()
    return templates


def _version() -> str:
    """Return a fingerprint of the static files, so that browsers may cache them."""
    digest = sha256()
    for path in sorted(STATIC.rglob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return "0" if value < 0.05 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def short(seconds: float | None) -> str:
    """Return a duration, in ms below a second."""
    return f"{seconds * 1000:.0f} ms" if seconds is not None and seconds < 1 else age(seconds)


_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def milliseconds(value: float | None) -> str:
    """Return a duration that is given in ms."""
    return short(None if value is None else value / 1000)


def age(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return _UNKNOWN
    if abs(seconds) < 10:
        return f"{seconds:.1f} s"
    return ("-" if seconds < 0 else "") + " ".join(islice(_parts(round(abs(seconds))), 2))


def _parts(seconds: int) -> Iterator[str]:
    """Yield the parts of a duration of at least a second, from its largest unit to the first that is 0."""
    begun = False
    for size, unit in _UNITS:
        count, seconds = divmod(seconds, size)
        if count:
            begun = True
            yield f"{count} {unit}"
        elif begun:
            return


def ago(value: str | float | datetime | None) -> Markup | str:
    """Return how long ago a moment was, in its largest unit, with the moment itself as a tooltip."""
    when = _read_moment(value)
    if when is None:
        return moment(value)
    seconds = (datetime.now(UTC) - when).total_seconds()
    # Clocks may differ a little.
    text = "just now" if seconds < 1 else f"{next(_parts(int(seconds)))} ago"
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        when.isoformat(timespec="milliseconds"), when.strftime(_SECONDS), text
    )


def memory(size: float | None) -> str:
    """Return a number of bytes in MiB or GiB."""
    if size is None:
        return _UNKNOWN
    return f"{size / (1 << 20):,.0f} MiB" if size < 1 << 30 else f"{size / (1 << 30):,.1f} GiB"


def load(cpu: float | None) -> str:
    """Return a load in percent of one core."""
    return _UNKNOWN if cpu is None else f"{cpu * 100:,.0f}%"


def due(seconds: float | None) -> str:
    """Return the time until a message is due; "due now" if it is overdue."""
    return "due now" if seconds is not None and seconds <= 0 else age(seconds)


def moment(value: str | float | datetime | None) -> Markup | str:
    """Return a moment, given in ISO 8601 or in seconds since 1970, in UTC."""
    when = _read_moment(value)
    if when is None:
        return _UNKNOWN if value is None else str(value)
    return Markup('<time datetime="{}">{}</time>').format(
        when.isoformat(timespec="milliseconds"), when.strftime(_SECONDS)
    )


def _read_moment(value: str | float | datetime | None) -> datetime | None:
    """Return a moment in UTC; None if there is none, or it is beyond the calendar."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        elif isinstance(value, int | float):
            value = datetime.fromtimestamp(value, UTC)
        return None if value is None else value.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None


def path(text: str) -> str:
    """Return a name as one part of an address."""
    return quote(text, safe="")


def setting(value: Any) -> Markup:
    return escape(_setting(value, "{}", "{}"))


def _setting(value: Any, table: str, array: str) -> str:
    """Return a setting in words; ``table`` and ``array``: what is put around such values."""
    if isinstance(value, Mapping):
        pairs = [f"{name} = {_setting(item, '{{ {} }}', '[{}]')}" for name, item in value.items()]
        return table.format(", ".join(pairs)) if pairs else "none"
    if isinstance(value, list | tuple | set | frozenset):
        return array.format(", ".join(map(str, value))) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
