"""Draws the state diagram of docs/protocol.md from the table of the lease machine.

Usage: ``python -m tests.docs.state_diagram`` writes it into the page.
"""

from __future__ import annotations

import re
from pathlib import Path

from marq.core.storage.rows import State
from marq.core.transitions import DUE, TRANSITIONS, Absent, Marker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
_DRAWN = re.compile(r"```mermaid\nstateDiagram-v2\n.*?```\n", re.DOTALL)


def diagram() -> str:
    """Return the diagram as Mermaid."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for marker, moves in TRANSITIONS.items():
        for state, to in moves.items():
            # A fact ends any message, but the tracker writes each only where DUE has it.
            if marker is not Marker.FACT and not (isinstance(state, Absent) and isinstance(to, Absent)):
                arrows.setdefault((_node(state), _node(to)), []).append(marker)
    for state, due in DUE.items():
        facts = " or ".join(dict.fromkeys([due.fact.name, due.exhausted.name]))
        arrows.setdefault((state.name, "[*]"), []).append(f"due ({facts})")
    order = ["[*]", *State.__members__]
    lines = [
        f"    {state} --> {to}: {', '.join(markers)}\n"
        for (state, to), markers in sorted(arrows.items(), key=lambda arrow: order.index(arrow[0][0]))
    ]
    return "```mermaid\nstateDiagram-v2\n" + "".join(lines) + "```\n"


def drawn() -> str:
    """Return the diagram that the page shows."""
    [block] = _DRAWN.findall(PAGE.read_text())
    return str(block)


def _node(state: State | Absent) -> str:
    return state.name if isinstance(state, State) else "[*]"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(drawn(), diagram()))
