"""Which errors of a broker say that it has not written a batch."""

from __future__ import annotations

import pytest
from aiokafka.errors import for_code

from marq.kafka.produce_errors import refusal
from marq.wire.errors import Refused

#: Codes of the protocol: a batch is invalid, too large, too old or too new, unordered, or forbidden by a policy.
REFUSED = [2, 10, 17, 18, 32, 43, 44, 45, 76, 87]
#: Unknown error, no leader, timeout, too few replicas (before and after the write), a failed disk.
UNKNOWN = [-1, 3, 5, 6, 7, 19, 20, 56]


@pytest.mark.parametrize("code", REFUSED)
def test_a_refused_batch_was_not_sent(code: int) -> None:
    error = refusal("orders", for_code(code)())

    assert isinstance(error, Refused)
    assert str(error).startswith("topic orders: the broker refused the records, so nothing was sent: ")
    assert f"[Error {code}]" in str(error)


@pytest.mark.parametrize("code", UNKNOWN)
def test_after_other_errors_nothing_is_known(code: int) -> None:
    assert refusal("orders", for_code(code)()) is None
