"""Dead letters of a new namespace, whose topic no worker has made yet."""

from __future__ import annotations

from uuid import uuid4

import marq


async def test_a_new_namespace_has_no_dead_letters(servers: str) -> None:
    for _ in range(5):
        async with marq.DeadLetters(servers, prefix=f"t{uuid4().hex[:12]}") as letters:
            assert await letters.count() == []
            assert await letters.redrive("emails") == marq.Redriven(0)
