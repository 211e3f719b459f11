"""Workers that differ, as in two deployments that share a namespace by mistake."""

from __future__ import annotations

from collections.abc import Sequence

from marq.kafka.group_members import GroupMember
from marq.wire.names import Names
from marq_worker.app.check.findings import Finding, warning
from marq_worker.app.client_id import Identity


def judge_differences(names: Names, members: Sequence[GroupMember]) -> list[Finding]:
    """Warn if the running workers of a namespace have different versions or definitions of queues."""
    identities = {identity for member in members if (identity := Identity.read(member.client_id)) is not None}
    different = [
        what
        for what, values in (
            ("versions", {identity.version for identity in identities}),
            ("definitions of queues", {identity.fingerprint for identity in identities}),
        )
        if len(values) > 1
    ]
    if not different:
        return []
    return [
        warning(
            "trackers",
            f"they have different {' and '.join(different)}",
            expected="the same for all, with the same MARQ_QUEUES_FILE",
            advice=(
                f"two sets of workers share MARQ_PREFIX={names.prefix}, or a rolling deploy is in progress. Give each"
                " its own prefix, or restart the outdated workers"
            ),
        )
    ]
