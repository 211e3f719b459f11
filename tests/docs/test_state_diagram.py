"""The state diagram of docs/protocol.md is the lease machine's table."""

from __future__ import annotations

from marq.core.storage.rows import State
from tests.docs.state_diagram import diagram, drawn


def test_the_page_shows_the_table() -> None:
    assert drawn() == diagram(), "run python -m tests.docs.state_diagram"


def test_every_state_is_in_the_diagram() -> None:
    for state in State:
        assert f"--> {state.name}:" in drawn(), f"nothing leads to {state.name}"
        assert f"    {state.name} --> [*]:" in drawn(), f"{state.name} never ends"
