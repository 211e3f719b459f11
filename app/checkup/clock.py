"""The clocks of this machine and of the broker."""

from __future__ import annotations

from dataclasses import dataclass

from app.checkup.findings import Finding, fine, warning

#: Clocks that differ by less do no harm.
ALLOWED_S = 5.0


@dataclass(frozen=True, slots=True)
class Appended:
    """When a record was sent, appended (by the broker's clock) and confirmed; ms since the epoch."""

    sent_ms: float
    appended_ms: float
    confirmed_ms: float

    @property
    def ahead_s(self) -> float:
        """By how many seconds this machine's clock is ahead of the broker's, at the least; below 0: it is behind."""
        if self.appended_ms < self.sent_ms:
            return (self.sent_ms - self.appended_ms) / 1000
        return min(0.0, self.confirmed_ms - self.appended_ms) / 1000


def judge_clock(appended: Appended) -> Finding:
    """Judge how far the clocks are apart."""
    ahead_s = appended.ahead_s
    if abs(ahead_s) <= ALLOWED_S:
        return fine("clock", f"differs from the broker's by at most {ALLOWED_S:g} s")
    return warning(
        "clock",
        f"this machine's is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the broker's",
        expected=f"at most {ALLOWED_S:g} s",
        advice=(
            "set the clocks by NTP (chrony, systemd-timesyncd). Times that this machine's clients write are wrong"
            " meanwhile (sent_at), and delays until a time of day (at=) end too early or too late. Leases, redelivery"
            " and delays in seconds do not depend on it: they go by the broker's clock alone"
        ),
    )
