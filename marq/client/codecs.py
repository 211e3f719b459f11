"""Codecs convert values to the bytes of a message and back, at the edges: all code in between sees only bytes.

Without a codec a value is bytes. A value that can't be decoded never will be: a handler that asks for it
makes its message a dead letter. Reasons never quote the value, because they go into headers and logs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from marq.client.outcomes import DecodeError, Outcome
from marq.wire.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

#: Faults of a pydantic model that a reason names.
_MAX_FAULTS = 5


class Codec(Protocol):
    """Encodes and decodes values: pass any object with these two methods as ``codec=``."""

    def encode(self, value: Any, /) -> bytes:
        """Return the bytes to send.

        Raises:
            TypeError, ValueError: the value can't be encoded; nothing is sent.
        """

    def decode(self, data: bytes, /) -> Any:
        """Return the value.

        Raises:
            DecodeError, or any other exception: the bytes can't be decoded; the message becomes a dead letter.
            Retry, OSError: another attempt may succeed.
        """


class _Bytes:
    """Bytes as they are: what holds without a codec."""

    def encode(self, value: object, /) -> bytes:
        if not isinstance(value, bytes):
            raise TypeError(
                f"a value must be bytes, not {type(value).__name__}: send json.dumps(value).encode(), for example,"
                " or give the client a codec, such as codec=marq.JSON"
            )
        return value

    def decode(self, data: bytes, /) -> bytes:
        return data

    def __repr__(self) -> str:
        return "marq.BYTES"


class _Json:
    """JSON as compact UTF-8; encodes dataclasses and pydantic models, too. NaN and infinities are refused: they are
    no JSON."""

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
        except (ValueError, RecursionError) as error:
            reason = str(error)
        # Outside of the clause, because the error there holds the value.
        raise DecodeError(f"the value ({len(data)} bytes) is not JSON: {reason}")

    def __repr__(self) -> str:
        return "marq.JSON"


def _plain(value: object) -> object:
    """Return what JSON can say of a value that it does not know."""
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


BYTES = _Bytes()
JSON = _Json()

M = TypeVar("M", bound="BaseModel")


class Model(Generic[M]):
    """A pydantic model as JSON, validated when it is received.

    Raises:
        ConfigError: pydantic 2 is not installed, or ``model`` is not a pydantic model.
    """

    def __init__(self, model: type[M]) -> None:
        try:
            from pydantic import BaseModel, ValidationError
        except ImportError as error:
            raise ConfigError("marq.Model needs pydantic 2: pip install 'pydantic>=2'") from error
        if not isinstance(model, type) or not issubclass(model, BaseModel) or model is BaseModel:
            raise ConfigError(f"marq.Model({model!r}): expected a class that is derived from pydantic.BaseModel")
        self._model = model
        self._invalid = ValidationError

    def encode(self, value: M, /) -> bytes:
        if not isinstance(value, self._model):
            raise TypeError(f"expected an instance of {self._model.__name__}, not {type(value).__name__}")
        # As JSON does it, which refuses NaN: pydantic itself would write null, which it then does not read.
        return JSON.encode(value)

    def decode(self, data: bytes, /) -> M:
        try:
            return self._model.model_validate_json(data)
        except self._invalid as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
        names = _names(self._model)
        text = "; ".join([f"{_place(fault['loc'], names)}{fault['type']}" for fault in faults[:_MAX_FAULTS]])
        more = f"; {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise DecodeError(f"the value ({len(data)} bytes) is not a valid {self._model.__name__}: {text}{more}")

    def __repr__(self) -> str:
        return f"marq.Model({self._model.__name__})"


def _names(model: type[BaseModel]) -> set[str]:
    names = set(model.model_fields)
    for field in model.model_fields.values():
        names |= {alias for alias in (field.alias, field.validation_alias) if isinstance(alias, str)}
    return names


def _place(location: tuple[int | str, ...], names: set[str]) -> str:
    """Return the place of a fault; only names of the model, because others come from the sender."""
    if not location or location[0] not in names:
        return ""
    return f"{location[0]}{'…' if len(location) > 1 else ''}: "


def check_codec(codec: Codec | None) -> Codec | None:
    """Return a codec; None for bytes, which then cost nothing. Raises ConfigError if it is none."""
    if codec is None or codec is BYTES:
        return None
    if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
        raise ConfigError(
            f"codec={codec!r}: expected marq.BYTES, marq.JSON, marq.Model(YourModel), or an object with the methods"
            " encode(value) -> bytes and decode(bytes) -> value"
        )
    return codec


def decode(codec: Codec, data: bytes) -> Any:
    """Decode a message's bytes with a codec. Raises DecodeError or Retry, Reject, OSError."""
    try:
        return codec.decode(data)
    except (Outcome, OSError):
        raise
    except Exception as error:
        # Not its text, which may quote the value.
        raise DecodeError(f"the value ({len(data)} bytes) can't be decoded: {type(error).__name__}") from error
