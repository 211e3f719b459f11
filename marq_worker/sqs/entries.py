"""The entries of a batch, each of which succeeds or fails separately."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from marq.wire.errors import MarqError
from marq_worker.sqs.errors import SqsError

T = TypeVar("T")
#: The members of an entry's answer, or why it failed.
Outcome = dict[str, Any] | SqsError | MarqError


def outcome_of(call: Callable[..., T], *arguments: Any) -> T | SqsError | MarqError:
    """Return what a call returns, or the error that it raises."""
    try:
        return call(*arguments)
    except (SqsError, MarqError) as error:
        return error


async def each_of(
    operation: Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]],
    queue: str,
    entries: Sequence[Mapping[str, Any]],
) -> list[Outcome]:
    """Carry out an operation on each entry."""

    async def outcome(entry: Mapping[str, Any]) -> Outcome:
        try:
            return await operation(queue, entry)
        except (SqsError, MarqError) as error:
            return error

    return await asyncio.gather(*[outcome(entry) for entry in entries])
