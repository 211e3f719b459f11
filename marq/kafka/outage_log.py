"""Log lines about an outage of one broker: a line at its start and at its end, and summaries in between."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from marq.settings.client import DEFAULT_CONNECT_TIMEOUT_MS

log = logging.getLogger("marq")

#: Least seconds between two log lines about a lasting failure.
SUMMARY_S = 30.0
#: Report a broker that has never answered only after this time, because a failed start has its own error by then.
SILENT_START_S = 1.5 * DEFAULT_CONNECT_TIMEOUT_MS / 1000

Address = tuple[str, int]


@dataclass(slots=True)
class OutageLog:
    """The log lines of one outage; times are monotonic seconds."""

    #: When the log last mentioned the outage; None while it has not.
    logged_at: float | None = None

    def failed(
        self, address: Address, error: BaseException, now: float, down_s: float, attempts: int, *, answered: bool
    ) -> None:
        """Report a failed attempt to reach the broker; ``answered``: whether this process has reached it before."""
        if self.logged_at is None:
            if not answered and down_s < SILENT_START_S:
                return
            log.warning("broker unreachable address=%s error=%s", text_of(address), reason_of(error))
        elif now - self.logged_at >= SUMMARY_S:
            log.warning(
                "broker still unreachable address=%s seconds=%.0f attempts=%d error=%s",
                text_of(address), down_s, attempts, reason_of(error),
            )  # fmt: skip
        else:
            return
        self.logged_at = now

    def returned(self, address: Address, down_s: float, attempts: int) -> None:
        """Report the end of the outage, if the log mentions the outage."""
        if self.logged_at is not None:
            # A warning like its counterpart, so that a log with the one line also has the other.
            log.warning(
                "broker reachable again address=%s seconds=%.0f attempts=%d", text_of(address), down_s, attempts
            )


def text_of(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(error: BaseException | None) -> str:
    return "no address was given" if error is None else str(error) or type(error).__name__
