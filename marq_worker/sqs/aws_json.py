"""The AWS JSON 1.0 protocol of SQS: requests to calls, and outputs and errors to answers.

Types and required members come from botocore's model of SQS, so each operation has one reader that is built from its
input shape. Members that the model lacks are dropped, because newer clients send some. The model has no limits;
see :mod:`marq_worker.sqs.limits`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from marq.wire.errors import ConfigError
from marq_worker.sqs.characters import is_text
from marq_worker.sqs.errors import SqsError

CONTENT_TYPE = "application/x-amz-json-1.0"
#: The header with X-Ray's trace of a call. The messages of the call have it as a parameter of the same name.
TRACE = "X-Amzn-Trace-Id"
_JSON_TYPES = frozenset({CONTENT_TYPE, "application/x-amz-json-1.1", "application/json"})
_FORM_TYPE = "application/x-www-form-urlencoded"
_TARGET = "AmazonSQS."
_API_VERSION = "2012-11-05"
#: Integers of the model have 32 bits.
_MAX_INTEGER = 2**31 - 1

Reader = Callable[[Any], Any]


class Call(NamedTuple):
    """An operation and its parameters as in the model; blobs are bytes."""

    operation: str
    parameters: dict[str, Any]


class _WrongValue(Exception):
    """A value that does not have its member's type; ``path`` leads to it, innermost name first."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.path: list[str] = []


def operations() -> frozenset[str]:
    """Return the names of SQS's operations, and load the model (0.15 s of CPU, 24 MB).

    Raises ConfigError if botocore is not installed.
    """
    return frozenset(_readers())


def wants_query(content_type: str | None, url_query: Mapping[str, str]) -> bool:
    """Return whether a request uses the older query protocol, which is answered with :func:`query_refusal`.

    Args:
        content_type: the header ``Content-Type``.
        url_query: the parameters in the URL, where a GET has its call.
    """
    return "Action" in url_query or _media_type(content_type) == _FORM_TYPE


def read_call(target: str | None, content_type: str | None, body: bytes) -> Call:
    """Read a request.

    Args:
        target: the header ``X-Amz-Target``.
        content_type: the header ``Content-Type``.

    Raises:
        SqsError: the request names no operation of SQS, is not JSON, lacks a member, or has one of another type.
    """
    if not target or not target.startswith(_TARGET) or (reader := _readers().get(target[len(_TARGET) :])) is None:
        raise SqsError(
            "UnknownOperationException", f"X-Amz-Target names no operation of SQS; expected {_TARGET}OPERATION"
        )
    if _media_type(content_type) not in _JSON_TYPES:
        raise SqsError("SerializationException", f"the body has another type; expected Content-Type: {CONTENT_TYPE}")
    try:
        document = json.loads(body.decode()) if body else {}
    except (ValueError, RecursionError) as error:
        raise SqsError("SerializationException", "the body is not valid JSON in UTF-8") from error
    try:
        return Call(target[len(_TARGET) :], reader(document))
    except _WrongValue as wrong:
        name = ".".join(reversed(wrong.path)) or "the body"
        raise SqsError("SerializationException", f"{name}: expected {wrong.expected}") from None


def add_trace(call: Call, trace: str | None) -> None:
    """Add the header :data:`TRACE` to the messages that a call sends; each may still have its own AWSTraceHeader."""
    # Proxies also write this header, so one that no message can have must not fail the call.
    if trace and call.operation in ("SendMessage", "SendMessageBatch") and is_text(trace):
        for message in call.parameters.get("Entries", [call.parameters]):
            message[TRACE] = trace


def answer(output: Mapping[str, Any]) -> bytes:
    """Return the body of a successful answer; bytes are sent as base64."""
    return json.dumps(output, default=_base64, ensure_ascii=False, separators=(",", ":")).encode()


def refusal(error: SqsError) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a refused call."""
    fault = "Sender" if error.sender_fault else "Receiver"
    headers = {"Content-Type": CONTENT_TYPE, "x-amzn-query-error": f"{error.code};{fault}"}
    return error.status, headers, answer({"__type": f"com.amazonaws.sqs#{error.shape}", "message": error.message})


def query_refusal(request_id: str = "") -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the refusal that clients of the query protocol can read."""
    error = SqsError(
        "UnsupportedOperation", f"the query protocol is not supported; use a client that sends {CONTENT_TYPE}"
    )
    body = (
        f'<?xml version="1.0"?><ErrorResponse xmlns="http://queue.amazonaws.com/doc/{_API_VERSION}/"><Error>'
        f"<Type>Sender</Type><Code>{error.code}</Code><Message>{escape(error.message)}</Message><Detail/></Error>"
        f"<RequestId>{escape(request_id)}</RequestId></ErrorResponse>"
    )
    return error.status, {"Content-Type": "text/xml"}, body.encode()


def _media_type(content_type: str | None) -> str:
    return (content_type or "").partition(";")[0].strip().lower()


def _base64(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"an answer has a value of type {type(value).__name__}")
    return b64encode(value).decode()


# --- readers ----------------------------------------------------------------------------------------------------------


@cache
def _readers() -> dict[str, Reader]:
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError as error:
        raise ConfigError(f"the SQS endpoint needs botocore ({error}): pip install 'marq[sqs]'") from error
    # The model of the package, not one that a user has put in ~/.aws/models.
    loader = Loader(extra_search_paths=[Loader.BUILTIN_DATA_PATH], include_default_search_paths=False)
    model = ServiceModel(loader.load_service_model("sqs", "service-2", _API_VERSION), "sqs")
    return {name: _reader(model.operation_model(name).input_shape) for name in model.operation_names}


def _reader(shape: Any) -> Reader:
    match shape.type_name:
        case "structure":
            members = {name: _reader(member) for name, member in shape.members.items()}
            return _structure_reader(members, tuple(shape.required_members))
        case "list":
            return _list_reader(_reader(shape.member))
        case "map":
            return _map_reader(_reader(shape.value))
    return _SCALARS[shape.type_name]


def _structure_reader(members: dict[str, Reader], required: tuple[str, ...]) -> Reader:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _WrongValue("an object")
        result = {}
        for name, item in value.items():
            # Some clients send null for a member that was not set.
            if item is not None and (reader := members.get(name)) is not None:
                try:
                    result[name] = reader(item)
                except _WrongValue as wrong:
                    wrong.path.append(name)
                    raise
        for name in required:
            if name not in result:
                raise SqsError("MissingParameter", f"the request has no {name}; add it")
        return result

    return read


def _list_reader(reader: Reader) -> Reader:
    def read(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _WrongValue("a list")
        return [reader(item) for item in value]

    return read


def _map_reader(reader: Reader) -> Reader:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _WrongValue("an object")
        return {_text(name): reader(item) for name, item in value.items() if item is not None}

    return read


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _WrongValue("text")
    if not value.isascii():
        try:
            # A JSON escape can be a lone surrogate, which no encoding can express.
            value.encode()
        except UnicodeEncodeError:
            raise _WrongValue("text without lone surrogates") from None
    return value


def _integer(value: Any) -> int:
    # bool is a subclass of int.
    if type(value) is not int or abs(value) > _MAX_INTEGER:
        raise _WrongValue("an integer of 32 bits")
    return value


def _blob(value: Any) -> bytes:
    try:
        return b64decode(_text(value), validate=True)
    except ValueError:
        raise _WrongValue("base64") from None


_SCALARS: dict[str, Reader] = {"string": _text, "integer": _integer, "blob": _blob}
