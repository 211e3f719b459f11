"""The clock of a markers partition: the running maximum of the broker's append times, corrected for its jumps.

Leases and delays are measured by this clock, from the position of their marker, so clocks of clients and trackers are
never compared. Append times of a partition can step back a little (a new leader's clock); the maximum hides that. It
cannot hide a broker's clock that jumps: between two TICKs of one tracker, the log's time and that tracker's monotonic
time must advance alike. If they differ by more than :data:`MAX_DRIFT_MS`, the monotonic time counts, and the error of
the broker's clock becomes the ``skew`` that is subtracted from later append times.

A TICK that reaches the log long after its monotonic time was read (because the broker stalled) would look like a jump
ahead, and the next one like a jump back. Leases acquired in between would expire early. So an owner gives up on a TICK
that takes too long (marq_worker/owner/partition_writer.py) and aborts its transaction, so that no tracker reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How far the log's time and a tracker's monotonic time may differ between two TICKs.
MAX_DRIFT_MS = 5_000


@dataclass(slots=True)
class LogClock:
    """``now_ms`` at a position of the log; the anchor is the last TICK of the current owner."""

    now_ms: int = 0
    skew_ms: int = 0
    anchor_holder: int = 0
    anchor_now_ms: int = 0
    anchor_monotonic_ms: int = 0

    @property
    def appended_ms(self) -> int:
        """The newest append time by the broker's clock: the time of the records that a tracker writes.

        With a wall clock more than an hour ahead of the broker's, the broker would refuse a record
        (message.timestamp.after.max.ms). With one that is behind, retention would remove it too early.
        """
        return self.now_ms + self.skew_ms

    @property
    def least_ms(self) -> int:
        """The lowest time that the clock can still show: that of the last TICK."""
        return self.anchor_now_ms

    def advance(self, append_time_ms: int) -> None:
        """Fold the append time of a record."""
        corrected = append_time_ms - self.skew_ms
        if corrected > self.now_ms:
            self.now_ms = corrected

    def tick(self, append_time_ms: int, holder: int, monotonic_ms: int) -> int:
        """Fold a TICK; return by how many ms the broker's clock jumped since the same holder's last one, or 0."""
        self.advance(append_time_ms)
        jump = 0
        if holder == self.anchor_holder:
            expected = self.anchor_now_ms + monotonic_ms - self.anchor_monotonic_ms
            ahead = self.now_ms - expected
            # Compared with the TICK's own time, not with the maximum: after a jump back, the maximum stops advancing,
            # so TICKs in quick succession would not show the jump.
            behind = append_time_ms - self.skew_ms - expected
            if ahead > MAX_DRIFT_MS or behind < -MAX_DRIFT_MS:
                jump = ahead if ahead > MAX_DRIFT_MS else behind
                self.now_ms = expected
                self.skew_ms = append_time_ms - expected
        self.anchor_holder = holder
        self.anchor_now_ms = self.now_ms
        self.anchor_monotonic_ms = monotonic_ms
        return jump
