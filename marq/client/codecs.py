"""Codecs convert values to a message's bytes and back, at the edges: all code in between only sees bytes.

Without a codec, a value is bytes. Retries can't help if a value can't be decoded, so if a handler reads such a value,
the message becomes a dead letter. Reasons never quote the value, because they go into headers and logs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol

from marq.client.outcomes import DecodeError, Outcome
from marq.wire.errors import ConfigError

if TYPE_CHECKING:
    # Defaults of type variables need Python 3.13.
    from typing_extensions import TypeVar

    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")

#: Maximum number of faults of a value that a reason names.
_MAX_FAULTS = 5


class Codec(Protocol[V]):
    """Encodes and decodes values: pass any object with these two methods as ``codec=``.

    A client with a ``Codec[Order]`` is typed: ``Consumer[Order]`` returns messages whose values are orders.
    """

    def encode(self, value: V, /) -> bytes:
        """Return the bytes to send.

        Raises:
            TypeError, ValueError: the value can't be encoded; nothing is sent.
        """

    def decode(self, data: bytes, /) -> V:
        """Return the value.

        Raises:
            DecodeError, or any other exception: the bytes can't be decoded; the message becomes a dead letter.
            Retry, OSError: another attempt may succeed.
        """


class _Bytes:
    """Bytes, unchanged: the default without a codec."""

    def encode(self, value: object, /) -> bytes:
        if not isinstance(value, bytes):
            raise TypeError(not_bytes(value))
        return value

    def decode(self, data: bytes, /) -> bytes:
        return data

    def __repr__(self) -> str:
        return "marq.BYTES"


class _Text:
    """Text (str) as UTF-8."""

    def encode(self, value: object, /) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"expected text (str), not {type(value).__name__}")
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            byte = error.start
        # Raised outside of the except clause, because the error there holds the value.
        raise DecodeError(f"the value ({len(data)} bytes) is not text: byte {byte} is not UTF-8")

    def __repr__(self) -> str:
        return "marq.TEXT"


class _Json:
    """JSON as compact UTF-8; also encodes dataclasses and pydantic models. Rejects NaN and infinities."""

    def encode(self, value: object, /) -> bytes:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
        return text.encode()

    def decode(self, data: bytes, /) -> Any:
        try:
            return json.loads(data.decode(), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            reason = f"byte {error.start} is not UTF-8"
        except json.JSONDecodeError as error:
            reason = f"at character {error.pos}: {error.msg}" if data else "it is empty"
        except ValueError as error:
            reason = str(error)
        except RecursionError:
            # Its own text differs between versions of Python.
            reason = "it is nested too deeply"
        # Raised outside of the except clause, because the error there holds the value.
        raise DecodeError(f"the value ({len(data)} bytes) is not JSON: {reason}")

    def __repr__(self) -> str:
        return "marq.JSON"


def _plain(value: object) -> object:
    """Return a JSON equivalent of a value of another type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        # With aliases and without computed fields, so that the same model can read it.
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    raise TypeError(
        f"JSON has no {type(value).__name__}: expected dict, list, str, int, float, bool, None, a dataclass or a"
        " pydantic model; convert the value, or write a codec"
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


class _JsonOf:
    """JSON objects or arrays, as dict or list."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def encode(self, value: object, /) -> bytes:
        if not isinstance(value, self._kind):
            raise TypeError(f"expected {self._kind.__name__}, not {type(value).__name__}")
        return JSON.encode(value)

    def decode(self, data: bytes, /) -> Any:
        value = JSON.decode(data)
        if not isinstance(value, self._kind):
            kinds = f"{type(value).__name__}, expected {self._kind.__name__}"
            raise DecodeError(f"the value ({len(data)} bytes) is JSON of type {kinds}")
        return value

    def __repr__(self) -> str:
        return f"JSON of type {self._kind.__name__}"


BYTES = _Bytes()
TEXT = _Text()
JSON = _Json()

M = TypeVar("M")


class Model(Generic[M]):
    """Values of one type as JSON, validated when they are received: a pydantic model, a dataclass, or another type that
    pydantic supports, such as ``list[Order]``.

    Raises:
        ConfigError: pydantic 2 is not installed, or does not know the type.
    """

    def __init__(self, model: type[M]) -> None:
        self._model = model
        self._name = model.__name__ if isinstance(model, type) else str(model)
        try:
            from pydantic import BaseModel, PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError
        except ImportError as error:
            raise ConfigError(f"marq.Model({self._name}) needs pydantic 2: pip install 'pydantic>=2'") from error
        if model is BaseModel:
            # It has no fields, so everything would be dropped.
            raise ConfigError("marq.Model(BaseModel): expected a subclass of it")
        try:
            self._adapter = TypeAdapter(model)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            raise ConfigError(
                f"marq.Model({self._name}): expected a type that pydantic supports, such as a model or a dataclass"
                f" ({str(error).partition(chr(10))[0]})"
            ) from error
        is_class = isinstance(model, type)
        self._is_model = is_class and issubclass(model, BaseModel)
        self._has_instances = self._is_model or (is_class and dataclasses.is_dataclass(model))
        self._invalid = ValidationError

    def encode(self, value: M, /) -> bytes:
        if self._has_instances and not isinstance(value, self._model):
            raise TypeError(f"expected an instance of {self._name}, not {type(value).__name__}")
        # With JSON, which refuses NaN: pydantic itself would write null, which it then can't read.
        if self._is_model:
            return JSON.encode(value)
        return JSON.encode(
            self._adapter.dump_python(value, mode="json", by_alias=True, round_trip=True, warnings="error")
        )

    def decode(self, data: bytes, /) -> M:
        try:
            return self._adapter.validate_json(data)
        except self._invalid as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
        names = _names(self._model)
        text = "; ".join([f"{_place(fault['loc'], names)}{fault['type']}" for fault in faults[:_MAX_FAULTS]])
        more = f"; {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise DecodeError(f"the value ({len(data)} bytes) is not a valid {self._name}: {text}{more}")

    def __repr__(self) -> str:
        return f"marq.Model({self._name})"


def _names(model: Any) -> set[str]:
    if dataclasses.is_dataclass(model):
        return {field.name for field in dataclasses.fields(model)}
    fields = getattr(model, "model_fields", {})
    names = set(fields)
    for field in fields.values():
        names |= {alias for alias in (field.alias, field.validation_alias) if isinstance(alias, str)}
    return names


def _place(location: tuple[int | str, ...], names: set[str]) -> str:
    """Return the place of a fault, with names of the model only, because others come from the sender."""
    if not location or location[0] not in names:
        return ""
    return f"{location[0]}{'…' if len(location) > 1 else ''}: "


#: Types that need no pydantic.
_PLAIN: list[tuple[Any, Codec]] = [
    (bytes, BYTES),
    (str, TEXT),
    *[(kind, _JsonOf(dict)) for kind in (dict, dict[str, Any], dict[str, object])],
    *[(kind, _JsonOf(list)) for kind in (list, list[Any], list[object])],
]


class CodecsByType(NamedTuple):
    """The codecs of a queue by the type of its messages; those of no listed type have the codec under None."""

    by_type: Mapping[str | None, Codec | None]

    def of(self, kind: str | None) -> Codec | None:
        return self.by_type[kind] if kind in self.by_type else self.by_type.get(None)


def codec_for(kind: Any) -> Codec:
    """Return the codec for values of a type, such as the annotation of a handler's parameter.

    Raises:
        ConfigError: the type needs pydantic 2, which is not installed, or pydantic does not know it.
    """
    return next((codec for plain, codec in _PLAIN if plain == kind), None) or Model(kind)


def not_bytes(value: object) -> str:
    """Return the text of the error for a value that is sent without a codec, and is not bytes."""
    if isinstance(value, bytearray | memoryview):
        return f"a value must be bytes, not {type(value).__name__}: send bytes(value)"
    codec = "TEXT" if isinstance(value, str) else "JSON"
    return (
        f"a value must be bytes, not {type(value).__name__}: encode it, or give the client a codec, such as"
        f" codec=marq.{codec}"
    )


def check_codec(codec: Codec[V] | None) -> Codec[V] | None:
    """Return a codec; None for bytes, which then cost nothing. Raises ConfigError for anything else."""
    if codec is None or isinstance(codec, _Bytes):
        return None
    if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
        raise ConfigError(
            f"codec={codec!r}: expected marq.BYTES, marq.TEXT, marq.JSON, marq.Model(YourModel), or an object with the"
            " methods encode(value) -> bytes and decode(bytes) -> value"
        )
    return codec


def decode(codec: Codec[V], data: bytes) -> V:
    """Decode a message's bytes with a codec. Raises DecodeError or Retry, Reject, OSError."""
    try:
        return codec.decode(data)
    except (Outcome, OSError):
        raise
    except Exception as error:
        # Without the error's text, which may quote the value.
        raise DecodeError(f"the value ({len(data)} bytes) can't be decoded: {type(error).__name__}") from error
