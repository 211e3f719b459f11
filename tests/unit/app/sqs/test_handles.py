"""Receipt handles: what was issued is read, and nothing else."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.client import message_token as plain_token
from marq.client.message_token import Token
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.handles import MAX_HANDLE, Handle, Handles

HANDLES = Handles(b"a secret of sixteen bytes")
TOKEN = Token("orders", 2**63 + 5, Source("marq.messages", 3), 17)
UNTIL_MS = 1_800_000_000_000
HANDLE = HANDLES.issue(TOKEN, "marq.messages/3/17", 1, UNTIL_MS)
TOKENS = st.builds(
    Token,
    st.text(min_size=1, max_size=40),
    st.integers(0, 2**64 - 1),
    st.builds(Source, st.text(min_size=1, max_size=40), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**63 - 1),
)


def refused(text: str, queue: str = "orders", handles: Handles = HANDLES) -> str:
    with pytest.raises(SqsError) as caught:
        handles.read(text, queue)
    assert (caught.value.shape, caught.value.status) == ("ReceiptHandleIsInvalid", 400)
    return caught.value.message


@given(TOKENS, st.text(min_size=1, max_size=60), st.integers(1, 2**32 - 1), st.sampled_from(["", "http://a:9324"]))
def test_a_handle_is_read_as_it_was_issued(token: Token, message_id: str, attempt: int, url: str) -> None:
    text = HANDLES.issue(token, message_id, attempt, UNTIL_MS, url)

    assert HANDLES.read(text, token.queue) == Handle(token, message_id, attempt, UNTIL_MS, url)
    assert text.isascii()
    assert set(text).isdisjoint("+/= \n")


def test_endpoints_with_one_secret_read_each_others_handles() -> None:
    assert Handles(b"a secret of sixteen bytes").read(HANDLE, "orders") == Handle(
        TOKEN, "marq.messages/3/17", 1, UNTIL_MS
    )


def test_a_handle_of_another_secret_is_refused() -> None:
    assert refused(HANDLE, handles=Handles(b"A secret of sixteen bytes")) == refused("garbage")


def test_a_handle_belongs_to_its_queue() -> None:
    assert refused(HANDLE, "Orders") == "the receipt handle belongs to another queue"


def test_a_token_of_marq_is_not_a_handle() -> None:
    assert "take it from ReceiveMessage" in refused(plain_token.encode(TOKEN))


def test_a_handle_with_any_other_byte_is_refused() -> None:
    data = urlsafe_b64decode(HANDLE + "=" * (-len(HANDLE) % 4))

    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert "not valid" in refused(urlsafe_b64encode(changed).decode().rstrip("="))
    for shorter in range(len(HANDLE)):
        assert "not valid" in refused(HANDLE[:shorter])


@given(st.text())
def test_no_other_text_is_a_handle(text: str) -> None:
    assert "not valid" in refused(text)


@pytest.mark.parametrize("text", [f" {HANDLE}", f"{HANDLE}\n", f"{HANDLE}!!!!", f"{HANDLE[:8]}....{HANDLE[8:]}"])
def test_a_handle_with_other_characters_is_refused(text: str) -> None:
    assert "not valid" in refused(text)


@pytest.mark.parametrize(
    ("token", "message_id"),
    [
        # The longest name in SQS, in its own topic, and redelivered from there through the messages topic.
        (Token("q" * 80, 2**64 - 1, Source("t" * 249, 2**31), 2**62), f"{'t' * 249}/{2**31}/{2**62}"),
        (Token("q" * 80, 2**64 - 1, Source("p" * 109, 2**31), 2**62), f"{'t' * 249}/{2**31}/{2**62}"),
        # The longest name in Marq.
        (Token("q" * 200, 2**64 - 1, Source("p" * 109, 2**31), 2**62), f"{'t' * 249}/{2**31}/{2**62}"),
    ],
)
def test_the_longest_handles_fit_what_clients_expect(token: Token, message_id: str) -> None:
    text = HANDLES.issue(token, message_id, 2**32 - 1, 2**63)

    assert len(text) < MAX_HANDLE
    assert HANDLES.read(text, token.queue).message_id == message_id


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 15 bytes; at least 16 are needed"):
        Handles(b"x" * 15)
