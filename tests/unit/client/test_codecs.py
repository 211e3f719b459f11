from __future__ import annotations

import enum
import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

import marq
from marq.client.codecs import check_codec, codec_for, decode


@dataclass
class Address:
    street: str
    number: int = 1


@dataclass
class Person:
    name: str
    addresses: list[Address] = field(default_factory=list)


class Email(BaseModel):
    model_config = ConfigDict(extra="forbid")

    to: str = Field(alias="recipient")
    weight: float = 1.0
    copies: list[int] = []

    @computed_field
    def length(self) -> int:
        return len(self.to)


class Colour(enum.Enum):
    RED = 1


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def encode(self, value: object) -> bytes:
        raise self.error

    def decode(self, data: bytes) -> object:
        raise self.error


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["text", 5, None, {"a": 1}])
def test_bytes_are_all_that_bytes_accepts(value) -> None:
    codec = "TEXT" if isinstance(value, str) else "JSON"

    with pytest.raises(TypeError, match=rf"must be bytes, not \w+: encode it, or .* codec=marq\.{codec}"):
        marq.BYTES.encode(value)


def test_other_objects_of_bytes_are_to_be_copied() -> None:
    with pytest.raises(TypeError, match=r"must be bytes, not memoryview: send bytes\(value\)"):
        marq.BYTES.encode(memoryview(b"x"))


def test_bytes_stay_what_they_are() -> None:
    value = b"\xff\x00"

    assert marq.BYTES.encode(value) is value
    assert marq.BYTES.decode(value) is value


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_is_utf_8() -> None:
    assert marq.TEXT.encode("Grüße") == "Grüße".encode()
    assert marq.TEXT.decode("Grüße".encode()) == "Grüße"


def test_text_refuses_other_values() -> None:
    with pytest.raises(TypeError, match=r"expected text \(str\), not bytes"):
        marq.TEXT.encode(b"x")


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "Grüße 🚚", [], [1, [2]], {"a": {"b": None}}, 10**30])
def test_json_round_trips(value) -> None:
    assert marq.JSON.decode(marq.JSON.encode(value)) == value


def test_json_is_compact_utf_8() -> None:
    assert marq.JSON.encode({"a": ["ä", 1]}) == '{"a":["ä",1]}'.encode()


def test_json_encodes_dataclasses_and_models_also_within_others() -> None:
    value = {"who": Person("Eve", [Address("Main", 2)]), "mail": Email(recipient="e@x.org")}

    assert json.loads(marq.JSON.encode(value)) == {
        "who": {"name": "Eve", "addresses": [{"street": "Main", "number": 2}]},
        "mail": {"recipient": "e@x.org", "weight": 1.0, "copies": []},
    }


@pytest.mark.parametrize(
    "value", [b"x", {1}, datetime(2026, 1, 1, tzinfo=UTC), Colour.RED, object(), Person, {(1,): 2}]
)
def test_json_refuses_what_it_has_no_form_for(value) -> None:
    with pytest.raises(TypeError):
        marq.JSON.encode([value])


@pytest.mark.parametrize("value", [float("nan"), [float("-inf")], Address("x", float("nan")), "\ud800"])  # type: ignore[arg-type]
def test_json_refuses_values_that_others_could_not_read(value) -> None:
    with pytest.raises(ValueError, match=r"JSON compliant|surrogates"):
        marq.JSON.encode(value)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_comes_back_as_it_was_with_alias_and_computed_field() -> None:
    codec, email = marq.Model(Email), Email(recipient="e@x.org", copies=[1, 2])

    assert codec.decode(codec.encode(email)) == email


def test_a_model_rejects_other_values() -> None:
    with pytest.raises(TypeError, match="expected an instance of Email, not dict"):
        marq.Model(Email).encode({"recipient": "e@x.org"})  # type: ignore[arg-type]


def test_a_model_refuses_what_it_could_not_read_again() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        marq.Model(Email).encode(Email(recipient="x", weight=float("nan")))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (BaseModel, "a subclass of it"),
        (Email(recipient="x"), "a type that pydantic supports"),
        (Raising, "pydantic supports"),
    ],
)
def test_a_type_that_pydantic_can_not_validate_is_no_model(model, said: str) -> None:
    with pytest.raises(marq.ConfigError, match=said):
        marq.Model(model)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Person, Person("Eve", [Address("Main", 2)])),
        (list[Person], [Person("Eve"), Person("Bob")]),
        (Email | None, None),
        (Email | None, Email(recipient="e@x.org")),
        (datetime, datetime(2026, 1, 1, tzinfo=UTC)),
        (Colour, Colour.RED),
    ],
)
def test_other_types_that_pydantic_knows_come_back_as_they_were(kind, value) -> None:
    codec = marq.Model(kind)

    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (Person, {"name": "Eve"}, TypeError),
        (list[Person], ["Eve"], ValueError),
        (list[int], [float("nan")], ValueError),
        (Address, Address("x", "many"), ValueError),  # type: ignore[arg-type]
    ],
)
def test_values_of_another_type_are_not_encoded(kind, value, error) -> None:
    with pytest.raises(error):
        marq.Model(kind).encode(value)


@pytest.mark.parametrize(
    ("codec", "data", "reason"),
    [
        (marq.JSON, b"", "(0 bytes) is not JSON: it is empty"),
        (marq.JSON, b"secret", "(6 bytes) is not JSON: at character 0: Expecting value"),
        (marq.JSON, b'{"secret": 1', "at character 12: Expecting ',' delimiter"),
        (marq.JSON, b'"secret\xff"', "byte 7 is not UTF-8"),
        (marq.JSON, b'["secret", NaN]', "NaN is not allowed"),
        (marq.JSON, b"[-Infinity]", "-Infinity is not allowed"),
        (marq.JSON, b"[" * 200_000, "it is nested too deeply"),
        (marq.JSON, b"1" * 5_000, "4300 digits"),
        (marq.Model(Email), b"{}", "(2 bytes) is not a valid Email: recipient: missing"),
        (marq.Model(Email), b"secret", "is not a valid Email: json_invalid"),
        (
            marq.Model(Email),
            b'{"recipient": 5, "copies": ["secret"]}',
            "recipient: string_type; copies…: int_parsing",
        ),
        (marq.Model(Email), b'{"recipient": "", "secret": 1}', "is not a valid Email: extra_forbidden"),
        (marq.Model(Email), b'{"copies": ["a","a","a","a","a","a"]}', "int_parsing; 2 more"),
        (
            marq.Model(Person),
            b'{"name": "Eve", "addresses": [{"secret": 1}]}',
            "is not a valid Person: addresses…: missing",
        ),
        (marq.TEXT, b"secret\xff", "the value (7 bytes) is not text: byte 6 is not UTF-8"),
    ],
)
def test_what_can_not_be_decoded_says_why_and_does_not_quote_it(
    codec: marq.Codec[object], data: bytes, reason: str
) -> None:
    with pytest.raises(marq.DecodeError) as caught:
        codec.decode(data)

    assert reason in caught.value.reason
    assert "secret" not in caught.value.reason
    # A traceback that is logged shows no error that holds the value, either.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


# --- codecs of annotations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, b"text", "text"),
        (dict, b'{"a":1}', {"a": 1}),
        (dict[str, object], b'{"a":1}', {"a": 1}),
        (list, b"[1]", [1]),
    ],
)
def test_plain_types_need_no_pydantic(monkeypatch, kind, data, value) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    codec = codec_for(kind)

    assert codec.decode(data) == value
    assert codec.encode(value) == data


def test_json_of_another_type_is_not_a_dict() -> None:
    with pytest.raises(marq.DecodeError, match=r"the value \(3 bytes\) is JSON of type list, expected dict"):
        codec_for(dict).decode(b"[1]")
    with pytest.raises(TypeError, match="expected dict, not list"):
        codec_for(dict).encode([1])


def test_without_pydantic_a_model_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)

    with pytest.raises(marq.ConfigError, match="needs pydantic 2"):
        marq.Model(Email)
    assert marq.JSON.encode(Address("Main")) == b'{"street":"Main","number":1}'


# --- codecs of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("secret"), ValueError("secret"), AttributeError("secret")])
def test_an_error_of_a_codec_makes_the_value_undecodable_and_is_not_quoted(error) -> None:
    with pytest.raises(marq.DecodeError) as caught:
        decode(Raising(error), b"abc")

    assert caught.value.reason == f"the value (3 bytes) can't be decoded: {type(error).__name__}"


@pytest.mark.parametrize("error", [marq.Retry(delay=5), marq.Reject("unwanted"), ConnectionError("registry is away")])
def test_a_codec_may_say_that_another_attempt_can_succeed(error) -> None:
    with pytest.raises(type(error)) as caught:
        decode(Raising(error), b"abc")

    assert caught.value is error


@pytest.mark.parametrize("codec", [5, json, dict, Raising, "json", Email])
def test_an_invalid_codec_is_rejected_with_the_expected_ones(codec) -> None:
    with pytest.raises(marq.ConfigError, match=r"expected marq\.BYTES, marq\.TEXT, marq\.JSON, marq\.Model\("):
        check_codec(codec)


def test_codecs_show_what_they_are() -> None:
    assert [repr(codec) for codec in (marq.BYTES, marq.JSON, marq.Model(Email))] == [
        "marq.BYTES", "marq.JSON", "marq.Model(Email)",
    ]  # fmt: skip
