"""The difference between the clocks of this machine and of the brokers."""

from __future__ import annotations

from dataclasses import dataclass

from marq_worker.app.check.findings import Finding, fine, warning

#: Smaller differences between clocks do no harm.
ALLOWED_S = 5.0


@dataclass(frozen=True, slots=True)
class Appended:
    """When a record was sent, appended (by the broker's clock) and confirmed, in ms since the epoch."""

    sent_ms: float
    appended_ms: float
    confirmed_ms: float

    @property
    def ahead_s(self) -> float:
        """Least number of seconds by which this machine's clock is ahead of the broker's; below 0: behind."""
        if self.appended_ms < self.sent_ms:
            return (self.sent_ms - self.appended_ms) / 1000
        return min(0.0, self.confirmed_ms - self.appended_ms) / 1000


def judge_clock(appended: Appended) -> Finding:
    ahead_s = appended.ahead_s
    if abs(ahead_s) <= ALLOWED_S:
        return fine("clock", f"at most {ALLOWED_S:g} s off the broker's clock")
    return warning(
        "clock",
        f"this machine's is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the broker's",
        expected=f"at most {ALLOWED_S:g} s",
        advice=(
            "synchronize the clocks with NTP (chrony, systemd-timesyncd). Until then, clients on this machine write"
            " wrong send times (sent_at), and delays until a given time (at=) end early or late. Leases, redelivery and"
            " delays in seconds use only the broker's clock"
        ),
    )
