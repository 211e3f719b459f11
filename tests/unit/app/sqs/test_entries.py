"""The entries of a batch, which fail one by one."""

from __future__ import annotations

import pytest

from marq.wire.errors import BrokerUnavailable
from marq_worker.sqs.entries import each_of, outcome_of
from marq_worker.sqs.errors import SqsError

REFUSED, UNSENT = SqsError("InvalidParameterValue", "by the test"), BrokerUnavailable("by the test")


def call(result: object) -> object:
    if isinstance(result, Exception):
        raise result
    return result


def test_an_error_of_an_entry_is_its_outcome() -> None:
    assert [outcome_of(call, result) for result in (1, REFUSED, UNSENT)] == [1, REFUSED, UNSENT]


def test_a_defect_is_not_an_outcome() -> None:
    with pytest.raises(KeyError):
        outcome_of(call, KeyError("by the test"))


async def test_each_entry_has_its_own_outcome() -> None:
    async def operation(queue, entry):
        return call(entry["result"])

    entries = [{"result": {"Id": "a"}}, {"result": REFUSED}, {"result": UNSENT}]

    assert await each_of(operation, "emails", entries) == [{"Id": "a"}, REFUSED, UNSENT]
