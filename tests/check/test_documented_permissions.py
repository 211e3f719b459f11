"""The commands of docs/operations/security.md grant what marq.kafka.role_permissions says that each role needs."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from marq.kafka.role_permissions import ROLES, Tools, grants
from marq.wire.names import Names

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "security.md"
#: The headings above the commands of each role, besides those of all roles.
TITLES = {
    "sender": ["Sender"],
    "consumer": ["Consumer"],
    "transactional-consumer": ["Consumer", "Transactional consumer"],
    "delayer": ["Sender of delayed messages"],
    "redriver": ["Redriver"],
    "worker": ["Worker"],
}


def block(title: str) -> str:
    permissions = PAGE.read_text(encoding="utf-8").partition("\n## Permissions\n")[2].partition("\n## ")[0]
    return permissions.partition(f"\n### {title}\n")[2].partition("```sh\n")[2].partition("```")[0]


def granted(script: str) -> set[tuple[str, ...]]:
    """Run a script with a kafka-acls.sh that only tells; return what it grants: (kind, name, operation, pattern)."""
    tell = "kafka-acls.sh() { printf '%q ' \"$@\"; echo; }\n"
    output = subprocess.run(["bash", "-c", tell + script], check=True, capture_output=True, text=True).stdout
    found: set[tuple[str, ...]] = set()
    for line in output.splitlines():
        options = shlex.split(line)
        pairs = list(itertools.pairwise(options))
        operations = [value for option, value in pairs if option == "--operation"]
        pattern = "prefixed" if ("--resource-pattern-type", "prefixed") in pairs else "literal"
        resources = [pair for pair in pairs if pair[0] in ("--topic", "--group", "--transactional-id")]
        found |= {(*resource, operation, pattern) for resource in resources for operation in operations}
    # Read and Write include Describe.
    implied = {(*rest, "Describe", pattern) for *rest, operation, pattern in found if operation in ("Read", "Write")}
    return found - implied


@pytest.mark.parametrize("role", ROLES)
def test_the_documented_commands_grant_what_a_role_needs_and_nothing_else(role: str) -> None:
    documented = granted(block("All roles") + "".join(re.sub(r"#.*", "", block(title)) for title in TITLES[role]))
    needed = granted("\n".join(grants(ROLES[role](Names(), ()), "User:x", Tools("HOST:9092"))))

    assert documented == needed
