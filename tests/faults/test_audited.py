"""What the data pipeline is told of deliveries in a fault run."""

from __future__ import annotations

import pytest

from faults.audited import _finished


@pytest.mark.parametrize(
    ("kind", "cause", "finished"),
    [
        ("REDELIVERED", "RELEASED", []),
        ("REDELIVERED", "EXPIRED", [("m", 0, 7)]),
        # The dead letter is the end: the delivery before it is no other one.
        ("DEAD_LETTERED", "EXPIRED", []),
        ("DEAD_LETTERED", "REJECTED", []),
    ],
)
def test_a_delivery_counts_unless_it_was_given_back_or_ended_by_a_dead_letter(
    kind: str, cause: str, finished: list[tuple[str, int, int]]
) -> None:
    delivered = {"op": "deliver", "record": "m/0/7"}
    fact = {"op": "marker", "kind": kind, "source": "m/0", "offsets": [7], "causes": [cause]}

    assert _finished([delivered, fact]) == finished
