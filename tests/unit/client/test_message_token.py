from __future__ import annotations

import pytest

from marq.client.message_token import Token, decode, encode
from marq.wire.markers import Source


def test_a_token_says_again_what_it_was_made_of() -> None:
    token = Token("käse 🧀", 2**64 - 1, Source("marq.messages", 3), 2**40)

    text = encode(token)

    assert decode(text) == token
    assert text.isascii()
    assert len(text) < 100


@pytest.mark.parametrize("text", ["", "x", "🧀", "AAAA", "A" * 40, "=" * 10])
def test_other_texts_are_not_tokens(text) -> None:
    with pytest.raises(ValueError, match="not a message token"):
        decode(text)
