"""The running trackers, from the members of their group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from marq.kafka.group_members import DescribedMember
from marq.wire.names import Names
from marq_worker.client_id import Identity
from marq_worker.findings import CheckFinding, fine, problem, warning
from marq_worker.web.conditions import SILENT


def judge_members(
    names: Names, members: Sequence[DescribedMember], *, begun: bool, silent: str | None = None
) -> Iterator[CheckFinding]:
    """Judge the trackers; ``begun``: whether the topics exist, that is, something has run before.

    ``silent``: the address of this machine's web port, if a process listens there that does not answer.
    """
    subject = "trackers"
    if not members:
        finding = f"none is running: group {names.app_id} has no members"
        start = ["marq worker"]
        if silent is not None:
            advice = f"a process at {silent} accepts connections, but does not answer. If it is a worker: {SILENT}"
            yield problem(subject, finding, advice=advice)
        elif not begun:
            yield warning(subject, finding, advice="start one", commands=start)
        else:
            advice = "until one runs, leases do not expire and released messages are not redelivered. Start one"
            yield problem(subject, finding, advice=advice, commands=start)
        return
    yield fine(subject, f"{len(members)} in group {names.app_id}: {'; '.join(map(str, members))}")
    yield from _judge_differences(names, members)


def _judge_differences(names: Names, members: Sequence[DescribedMember]) -> Iterator[CheckFinding]:
    """Warn if workers differ, except in the definitions of different projects."""
    identities = {identity for member in members if (identity := Identity.read(member.client_id)) is not None}
    different = ["versions"] if len({identity.version for identity in identities}) > 1 else []
    files = Counter(
        project
        for project, _ in {(identity.project, identity.fingerprint) for identity in identities if identity.publishes}
    )
    different += [
        f"definitions of queues in project {project}" if project else "definitions of queues"
        for project, count in sorted(files.items())
        if count > 1
    ]
    if different:
        yield warning(
            "trackers",
            f"they have different {' and '.join(different)}",
            expected="the same for all workers of a project, with the same MARQ_QUEUES_FILE",
            advice=(
                f"a rolling deploy is in progress, or two projects share MARQ_PREFIX={names.prefix}. Restart the"
                " outdated workers, or give each project a name (MARQ_PROJECT) or its own prefix"
            ),
        )
