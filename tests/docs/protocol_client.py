"""A client that is made from docs/protocol.md: sizes, types, flags, codes and names are those of its tables.

This module does not import Marq. It implements the page's sentences (the value of a length, the meaning of a flag's
default, the order of the steps) as code and reads the page's tables. The part that talks to a broker is
in protocol_receiver.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"

#: In the table of flags: no column belongs to the flag.
NO_COLUMN = "\u2013"

Row = dict[str, str]
Values = dict[str, Any]


# --- the page's tables ------------------------------------------------------------------------------------------------


class Page:
    """Sections of the page by the anchor of their heading, and the tables in them."""

    def __init__(self, text: str) -> None:
        self._sections: dict[str, str] = {}
        for title, body in re.findall(r"^#+ (.+)\n((?:(?!#+ ).*\n?)*)", text, re.MULTILINE):
            self._sections[re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")] = body

    def tables(self, anchor: str) -> list[list[Row]]:
        """Return the tables of a section: rows by the names of their columns."""
        found = re.findall(r"(?:^\|.*\|\n)+", self._sections[anchor] + "\n", re.MULTILINE)
        return [self._table([_cells(line) for line in table.splitlines()]) for table in found]

    def _table(self, lines: list[list[str]]) -> list[Row]:
        names, _, *rows = lines
        return [dict(zip(names, row, strict=True)) for row in rows]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


# --- marker batches ---------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """One row of a layout. ``variable`` is the name of the length in the row: q, t or n."""

    name: str
    type: str
    size: str
    variable: str
    constant: bytes | None
    flag: str
    absent_with_flag: bool


def _field(row: Row) -> Field:
    name, value = row["field"], row.get("value", "")
    variable = re.search(r"\*(\w)\*", name)
    condition = re.search(r"(only|absent) with flag (\w+)", value)
    constant = re.match(r"`([0-9a-f ]+)`|(\d+)$", value)
    return Field(
        name=re.sub(r" \*\w\*", "", name),
        type=row["type"],
        size=row["size"],
        variable=variable[1] if variable else "",
        constant=bytes.fromhex(constant[1] or f"{int(constant[2]):02x}") if constant else None,
        flag=condition[2] if condition else "",
        absent_with_flag=bool(condition) and condition[1] == "absent",
    )


class Flag(NamedTuple):
    """``column`` is the one that is there when the flag is set; ``default`` is what the column's entries are else."""

    value: int
    kinds: str
    column: str
    default: str

    def is_in(self, kind: str) -> bool:
        return kind in self.kinds.split(", ") or (self.kinds == "all but TICK" and kind != "TICK")


class InRecord(Enum):
    """Stands for a value that is only in its message's record."""

    LEFT = "in the record"


IN_RECORD = InRecord.LEFT


class Reader:
    """A position in bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        self.position += size
        if size < 0 or self.position > len(self.data):
            raise ValueError("unreadable: a field passes the end")
        return self.data[self.position - size : self.position]

    def end(self) -> None:
        if self.position != len(self.data):
            raise ValueError("unreadable: bytes are left over")


class Protocol:
    """Encoder and decoder of marker batches, and the names and rules besides."""

    def __init__(self, page: Page) -> None:
        self._head = [_field(row) for row in page.tables("head")[0]]
        self._frame = [_field(row) for row in page.tables("frame")[0]]
        self.flags = {
            row["name"]: Flag(int(row["value"]), row["in"], row["column"], row["when not set"])
            for row in page.tables("flags")[0]
            if row["name"].isupper()
        }
        kinds = page.tables("kinds")[0]
        self.kinds = {row["kind"]: int(row["code"]) for row in kinds}
        self._bodies = {row["kind"]: self._body(page, row["body"]) for row in kinds}
        #: How an ANSWERED says what became of a question.
        outcomes = next(row["value"] for row in page.tables("answered-37")[0] if row["field"] == "outcomes")
        self.outcomes = {name: int(code) for code, name in re.findall(r"(\d) ([A-Z_]+):", outcomes)}
        self.deciding = page.tables("cancel-or-reschedule-a-message")[0]
        self._lengths = {row["type"]: row["lengths"].removesuffix(" each") for row in page.tables("columns")[0]}
        header_rows = page.tables("acquire-1")[1]
        self._header_types = [row["type"] for row in header_rows if row["type"] not in ("text", "bytes")]
        self.names = Names(page)
        self.queue_definitions = Definitions(page)

    def _body(self, page: Page, text: str) -> list[Field]:
        link = re.search(r"\(#(.+)\)", text)
        return [_field(row) for row in page.tables(link[1])[0]] if link else []

    def _layout(self, kind: str) -> list[Field]:
        # "In every kind but TICK the frame follows the head."
        return [*self._head, *([] if kind == "TICK" else self._frame), *self._bodies[kind]]

    def encode(self, kind: str, values: Values, *, written: Sequence[str] = ()) -> bytes:
        """Return a batch; ``values`` by the names of fields, and ``offsets``; ``written``: flags set without need."""
        offsets = values.get("offsets", ())
        flags = {name for name, flag in self.flags.items() if self._is_needed(kind, flag, name, values)} | {*written}
        filled = {
            **values,
            "kind": self.kinds[kind],
            "flags": sum(self.flags[name].value for name in flags),
            "count": len(offsets),
            "base": offsets[0] if offsets else 0,
            "deltas": [offset - offsets[0] for offset in offsets],
            # "Queue length … 0 in a TICK."
            "queue length": len(values.get("queue", "").encode()),
            "topic length": len(values.get("topic", "").encode()),
            # "For each interval the first offset, and the offset after the last one."
            "interval count": len(values.get("acquired", ())) // 2,
        }
        return b"".join(
            self._encode(field, filled.get(field.name))
            for field in self._layout(kind)
            if _is_there(field, flags)
        )  # fmt: skip

    def _is_needed(self, kind: str, flag: Flag, name: str, values: Values) -> bool:
        if name == "CONTIGUOUS":
            offsets = values.get("offsets", ())
            return bool(offsets) and list(offsets) == list(range(offsets[0], offsets[0] + len(offsets)))
        if not flag.is_in(kind):
            return False
        if name == "UNCOUNTED":
            return not values.get("counted", True)
        if flag.column == NO_COLUMN:
            return bool(values.get(name.lower(), False))
        default = self._default(flag, values["queue"])
        return any(entry != default for entry in values.get(flag.column, ()))

    def _default(self, flag: Flag, queue: str) -> Any:
        meanings: dict[str, Any] = {
            "each is 1": 1,
            "each is the queue's name": queue.encode(),
            "each is empty: no headers": [],
            "each is empty: no error": "",
            "each is none: no due time": -1,
        }
        return meanings[flag.default]

    def _encode(self, field: Field, value: Any) -> bytes:
        if field.constant is not None:
            return field.constant
        if field.name == "headers":
            value = [self._encode_headers(header) for header in value]
        if field.type == "text":
            return str(value).encode()
        if field.type.endswith(" each"):
            return b"".join(_pack(field.type.removesuffix(" each"), entry) for entry in value)
        if field.type in self._lengths:
            length = self._lengths[field.type]
            entries = [entry.encode() if isinstance(entry, str) else entry for entry in value]
            lengths = b"".join(_pack(length, _length(entry)) for entry in entries)
            return lengths + b"".join(entry for entry in entries if isinstance(entry, bytes))
        return _pack(field.type, value)

    def _encode_headers(self, headers: Sequence[tuple[str, bytes | None]]) -> bytes:
        count, name_length, value_length = self._header_types
        data = _pack(count, len(headers))
        for name, value in headers:
            data += _pack(name_length, len(name.encode())) + name.encode()
            data += _pack(value_length, -1 if value is None else len(value)) + (value or b"")
        return data

    def decode(self, data: bytes) -> tuple[str, Values]:
        """Return kind and values of a batch, columns that are not there filled with what they stand for."""
        reader = Reader(data)
        values: Values = {}
        sizes: dict[str, int] = {}
        self._decode_fields(reader, self._head, values, sizes, set())
        kind = next(name for name, code in self.kinds.items() if code == values["kind"])
        flags = {name for name, flag in self.flags.items() if flag.is_in(kind) and values["flags"] & flag.value}
        self._decode_fields(reader, self._layout(kind)[len(self._head) :], values, sizes, flags)
        reader.end()
        if kind != "TICK":
            deltas = values.get("deltas", range(values["count"]))
            values["offsets"] = [values["base"] + delta for delta in deltas]
            for name, flag in self.flags.items():
                if not flag.is_in(kind):
                    continue
                if flag.column in (field.name for field in self._bodies[kind]):
                    values.setdefault(flag.column, [self._default(flag, values["queue"])] * values["count"])
                elif name == "UNCOUNTED":
                    values["counted"] = name not in flags
                elif flag.column == NO_COLUMN:
                    values[name.lower()] = name in flags
        return kind, values

    def _decode_fields(
        self, reader: Reader, fields: Sequence[Field], values: Values, sizes: dict[str, int], flags: set[str]
    ) -> None:
        for field in fields:
            if not _is_there(field, flags):
                continue
            may_be_left = field.name == "values" and values["kind"] == self.kinds["ACQUIRE"]
            values[field.name] = self._decode(reader, field, sizes, may_be_left=may_be_left)
            if field.variable:
                sizes[field.variable] = values[field.name]

    def _decode(self, reader: Reader, field: Field, sizes: Mapping[str, int], *, may_be_left: bool) -> Any:
        if field.type == "text":
            return reader.take(sizes[field.size.strip("*")]).decode()
        if field.type == "bytes":
            return reader.take(int(field.size))
        if field.type.endswith(" each"):
            number = field.type.removesuffix(" each")
            return [_unpack(number, reader) for _ in range(_size(field, sizes) // _bytes(number))]
        if field.type in self._lengths:
            lengths = [_unpack(self._lengths[field.type], reader) for _ in range(sizes["n"])]
            # "A length of -2 says that the payload is only in the record": of a value in an ACQUIRE.
            entries = [
                None if length == -1 else IN_RECORD if length == -2 and may_be_left else reader.take(length)
                for length in lengths
            ]
            if field.name == "headers":
                return [self._decode_headers(entry) for entry in entries]
            return [(entry or b"").decode() for entry in entries] if field.type == "texts" else entries
        return _unpack(field.type, reader)

    def _decode_headers(self, data: bytes | None) -> list[tuple[str, bytes | None]]:
        if not data:
            return []
        reader = Reader(data)
        count, name_length, value_length = self._header_types
        headers: list[tuple[str, bytes | None]] = []
        for _ in range(_unpack(count, reader)):
            name = reader.take(_unpack(name_length, reader)).decode()
            length = _unpack(value_length, reader)
            headers.append((name, None if length == -1 else reader.take(length)))
        reader.end()
        return headers


def _length(entry: bytes | InRecord | None) -> int:
    return -1 if entry is None else -2 if isinstance(entry, InRecord) else len(entry)


def _is_there(field: Field, flags: set[str]) -> bool:
    return not field.flag or (field.flag in flags) != field.absent_with_flag


def _size(field: Field, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a column: "4·*n*" or "*n*"."""
    found = re.match(r"(?:(\d+)·)?\*(\w)\*", field.size)
    assert found is not None, field.size
    return int(found[1] or 1) * sizes[found[2]]


def _bytes(number: str) -> int:
    return int(number[1:]) // 8


def _pack(kind: str, value: int) -> bytes:
    return value.to_bytes(_bytes(kind), "big", signed=kind[0] == "i")


def _unpack(kind: str, reader: Reader) -> int:
    return int.from_bytes(reader.take(_bytes(kind)), "big", signed=kind[0] == "i")


# --- names and definitions of queues ----------------------------------------------------------------------------------


class Names:
    """Topics and groups, by what the tables say they are."""

    def __init__(self, page: Page) -> None:
        topics, others = page.tables("topics-groups-and-names")
        self._topics = {_plain(row["what"]): row["name"].strip("`") for row in topics}
        groups = [row["name"].removeprefix("group ").strip("`") for row in others if row["name"].startswith("group")]
        self._queue_group, self._named_group = groups[:2]

    def topic(self, what: str, prefix: str) -> str:
        return self._topics[what].replace("PREFIX", prefix)

    def group(self, prefix: str, queue: str, named: str | None) -> str:
        if named is not None:
            return self._named_group.replace("PREFIX", prefix).replace("GROUP", named)
        return self._queue_group.replace("PREFIX", prefix).replace("NAME", queue)

    def owner(self, prefix: str, group: str) -> str | None:
        """Return the queue whose own a group is."""
        head = self.group(prefix, "", None)
        return group.removeprefix(head) if group.startswith(head) else None

    def is_group(self, prefix: str, group: str) -> bool:
        return group.startswith((self.group(prefix, "", None), self.group(prefix, "", "")))


def _plain(text: str) -> str:
    return re.sub(r"\[(.+)\]\(.+\)", r"\1", text)


class Definitions:
    """The fold over the queues topic."""

    def __init__(self, page: Page) -> None:
        layers, keys = page.tables("definitions-of-queues")
        #: Weakest first: "the last layer of the table above that has it counts".
        self._layers = [row["key"].strip("`").removesuffix(":NAME") for row in layers]
        self._keys = {row["key"].strip("`"): row for row in keys}
        self._documents: dict[str, Values] = {}
        self._projects: dict[str, str] = {}

    def fold(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record; one that does not fit the tables counts as if it were not there."""
        try:
            name = (key or b"").decode()
            layer, colon, queue = name.partition(":")
            document = {} if value is None else json.loads(value)
        except ValueError:
            return
        fits = layer in self._layers and (layer == "defaults" or colon) and isinstance(document, dict)
        if not fits or (colon and not 0 < len(queue.encode()) <= 200):
            return
        known = {key: document[key] for key in document if key in self._keys and "." not in key}
        if all(self._is_fine(key, entry, layer) for key, entry in known.items()):
            self._documents.pop(name, None)
            self._projects.pop(name, None)
            if value is not None:
                self._documents[name] = known
                project = document.get("project")
                self._projects[name] = project if isinstance(project, str) else ""

    def settings(self, queue: str) -> Values:
        """Return what holds for a queue, key by key."""
        found = {key: _default(row) for key, row in self._keys.items() if "." not in key}
        project = self._project(queue)
        names = [layer if layer.startswith("defaults") else f"{layer}:{queue}" for layer in self._layers]
        names[:2] = [f"defaults:{project}" if project else "defaults"]
        layers = [self._documents.get(name, {}) for name in names]
        for document in layers:
            found |= document
        # "or the lease if that is longer"
        if not any("max_lease" in document for document in layers):
            found["max_lease"] = max(found["max_lease"], found["lease"])
        # "true if the queue delivers at most once"
        found["transactional"] |= found["delivery"] == "at-most-once"
        return {
            **found,
            "backoff": self._backoff(found["backoff"] or {}),
            "errors": {name: None if _rejects(said) else self._backoff(said) for name, said in found["errors"].items()},
            "breaker": found["breaker"] is not False and {**self._inner("breaker"), **found["breaker"]},
        }

    def _backoff(self, said: Any) -> Values:
        given = {"delays": said} if isinstance(said, list) else said
        otherwise = {"jitter": False} if "delays" in given else {}
        return {**self._inner("backoff"), **otherwise, **given}

    def _inner(self, key: str) -> Values:
        return {
            name.removeprefix(f"{key}."): _default(row)
            for name, row in self._keys.items()
            if name.startswith(f"{key}.")
        }

    def group(self, queue: str) -> str | None:
        """Return the named group of a queue."""
        settings = self.settings(queue)
        project = self._project(queue)
        handlers = f"handlers.{project}" if project else "handlers"
        return settings["group"] or (handlers if settings["handler"] else None)

    def _project(self, queue: str) -> str:
        """Return the project that defines a queue, "" if that has no name."""
        return max(self._projects.get(f"{layer}:{queue}", "") for layer in ("handler", "file"))

    def _is_fine(self, key: str, value: object, layer: str) -> bool:
        row = self._keys[key]
        if layer == "defaults" and "not in `defaults`" in row["what"]:
            return False
        if value is False and "or false" in row["type"]:
            return True
        if row["type"] == "object of errors":
            return isinstance(value, dict) and all(
                _rejects(entry) or self._is_fine("backoff", entry, layer) for entry in value.values()
            )
        if row["type"].startswith("object"):
            if isinstance(value, list) and "or array" in row["type"]:
                value = {"delays": value}
            if not isinstance(value, dict):
                return False
            return not ("delays" in value and {"base", "factor", "max"} & value.keys()) and all(
                f"{key}.{name}" in self._keys and self._is_fine(f"{key}.{name}", entry, layer)
                for name, entry in value.items()
            )
        if row["type"] == "array of numbers":
            count, each_range = row["range"].split(" of them, each ")
            return (
                isinstance(value, list)
                and _is_in_range(count, len(value))
                and all(_has_type("number", number) and _is_in_range(each_range, number) for number in value)
            )
        if row["type"] == "one of these texts":
            return value in re.findall(r"`([^`]+)`", row["range"])
        if row["type"] == "boolean or time" and isinstance(value, str):
            return _is_time(value)
        if value in ("unlimited", "all"):
            return f'"{value}"' in row["type"]
        return _has_type(row["type"], value) and _is_in_range(row["range"], value)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _rejects(said: object) -> bool:
    return said is False or said == "reject"


def _default(row: Row) -> Any:
    if row["type"] == "object of errors":
        return {}
    return None if row["default"] in ("none", "") else json.loads(row["default"].partition(";")[0])


def _has_type(name: str, value: object) -> bool:
    types: dict[str, tuple[type, ...]] = {
        "number": (int, float), "whole number": (int,), "boolean": (bool,), "text": (str,)
    }  # fmt: skip
    name = name.partition(" or ")[0]
    return isinstance(value, types[name]) and (name == "boolean" or not isinstance(value, bool))


def _is_in_range(text: str, value: Any) -> bool:
    numbers = re.match(r"(above )?([\d,]+?),? to ([\d,]+)$", text)
    if numbers:
        least, most = _number(numbers[2]), _number(numbers[3])
        return bool(least <= value <= most and not (numbers[1] and value == least))
    if text.endswith("`/h`"):
        rate = re.fullmatch(r"([0-9]+)/(s|min|h)", value)
        return rate is not None and _is_in_range(text.partition(", then")[0], int(rate[1]))
    if text.startswith("`ordering`, or"):
        header = value.removeprefix("header:")
        return value == "ordering" or bool(value != header and header and header == header.strip())
    if text.startswith("1 to 249 of"):
        return re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", value) is not None
    if text == "the name of a group":
        return 0 < len(value.encode()) <= 200 and value.isprintable()
    return re.fullmatch(r"[^:]+:[^:]+", value) is not None if text == "`module:function`" else True


# --- positions --------------------------------------------------------------------------------------------------------


def write_metadata(positions: Mapping[str, int], offset: int) -> str:
    """Return what to commit with an offset."""
    past = {queue: position for queue, position in sorted(positions.items()) if position != offset}
    document = {"at": sorted(queue for queue, position in positions.items() if position == offset), "past": past}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    if past and len(text.encode()) > 4_096:
        lowest = min(past, key=lambda queue: past[queue])
        return write_metadata({queue: at for queue, at in positions.items() if queue != lowest}, offset)
    return text


def read_metadata(offset: int, metadata: str, owner: str | None) -> dict[str, int]:
    """Return the positions that a commit speaks of."""
    if owner is not None and not metadata:
        return {owner: offset}
    try:
        document = json.loads(metadata)
        return {**dict.fromkeys(document["at"], offset), **document["past"], **document.get("behind", {})}
    except (ValueError, KeyError, TypeError):
        return {}


def markers_partition(topic: str, partition: int, count: int) -> int:
    """The partition rule."""
    return (crc32(topic.encode()) + partition) % count


def drawn_topic(number: int) -> str:
    """The topic of a source that a sender draws."""
    return f"~{number:032x}"


def read() -> Protocol:
    """Return the protocol as the page has it now."""
    return Protocol(Page(PAGE.read_text(encoding="utf-8")))
