"""Whether all unreadable markers, and no others, are in quarantine."""

from __future__ import annotations

from lab.proof.evidence import Evidence


def judge_quarantine(evidence: Evidence) -> None:
    """Compare the quarantine with the logs."""
    find = evidence.report.find
    for log in list(evidence.logs.values()):
        for offset, content in log.unreadable.items():
            origin = f"{log.name}/{offset}"
            kept = evidence.quarantined.get(origin, [])
            if not kept and not log.halted:
                find("quarantine", f"{origin} is not in quarantine")
            elif set(kept) - {content}:
                find("quarantine", f"{origin}: another content in quarantine")
            elif len(kept) > max(1, evidence.owners[log.name]):
                # A new owner does not know of a transaction with an unknown outcome.
                find("quarantine", f"{origin} is in quarantine {len(kept)} times")
    for origin in evidence.quarantined:
        name, _, offset = origin.rpartition("/")
        if int(offset) not in evidence.log(name).unreadable:
            find("quarantine", f"{origin} is in quarantine, but readable")
