"""How payloads of any kind are shown."""

from __future__ import annotations

import json

import pytest

from marq_worker.redaction import ALL_HIDDEN, HIDDEN, MAX_TEXT, Redaction


def test_fields_and_headers_are_hidden_at_any_depth_and_in_any_case() -> None:
    redaction = Redaction(["Password", "card"])
    value = json.dumps({"user": {"PASSWORD": "x1", "name": "Ann"}, "cards": [{"card": {"number": "x2"}}]}).encode()

    shown = [redaction.text(value, 1_000) or "", *(form.text for form in redaction.forms(value))]

    assert all("x1" not in text and "x2" not in text and HIDDEN in text and "Ann" in text for text in shown)
    assert redaction.headers([("CARD", b"x2"), ("tenant", b"acme"), ("marq-id", b"1")], 100) == {
        "CARD": HIDDEN,
        "tenant": "acme",
    }


@pytest.mark.parametrize(
    "value",
    [
        b"password=x1", b"\xff\xfe", b"[" * 60_000, b'{"a": ' + b"9" * 5_000 + b"}",
        b'{"card": "x1"' + b" " * 70_000 + b"}",
    ],
    ids=["text", "bytes", "brackets", "digits", "long"],
)  # fmt: skip
def test_what_can_t_be_looked_through_is_hidden_as_a_whole(value: bytes) -> None:
    redaction = Redaction(["card", "password"])

    assert redaction.text(value, 1_000) == ALL_HIDDEN
    assert [form.text for form in redaction.forms(value)] == [ALL_HIDDEN]


def test_without_anything_to_hide_a_payload_is_shown_in_all_its_forms() -> None:
    forms = {form.name: form for form in Redaction().forms(b'{"name":"B\xc3\xb6se"}')}

    assert forms["JSON"].text == '{\n  "name": "Böse"\n}'
    assert forms["text"].text == '{"name":"Böse"}'
    assert forms["hex"].text.startswith('000000  7b 22 6e 61 6d 65 22 3a 22 42 c3 b6 73 65 22 7d  {"name":"B..se"}')


def test_of_a_long_payload_the_beginning_is_shown_and_that_is_said() -> None:
    text, hexadecimal = Redaction().forms(b"x" * 1_000_000)

    assert (len(text.text), text.cut, hexadecimal.cut) == (MAX_TEXT, True, True)


def test_an_empty_payload_has_no_form() -> None:
    assert Redaction().forms(b"") == Redaction().forms(None) == []
    assert Redaction(["card"]).text(None, 10) is None


def test_a_traceback_is_hidden_if_anything_is() -> None:
    assert Redaction().traceback("Traceback: in bill") == "Traceback: in bill"
    assert "bill" not in Redaction(["card"]).traceback("Traceback: in bill")
    assert Redaction(["card"]).traceback("") == ""


@pytest.mark.parametrize("names", [(), ("card",)])
def test_half_of_a_surrogate_pair_is_shown_as_it_is_escaped(names: tuple[str, ...]) -> None:
    redaction, value = Redaction(names), rb'{"\udfff": "\ud800"}'

    texts = [redaction.forms(value)[0].text, redaction.text(value, 1_024)]

    # What a page or an answer is made of is sent in UTF-8.
    assert all(text is not None and rb"\udfff" in text.encode() for text in texts)
