"""Errors that end a purge before it is complete, and what they say about the pause of the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from marq.wire.errors import ConfigError, MarqError


class PurgeEnded(MarqError):
    """Another purge or a user has decided whether the queue stays paused."""

    @classmethod
    def by_another(cls, queue: str) -> PurgeEnded:
        return cls(
            f"queue {queue!r}: another purge has taken over, so this one has ended; the other one completes it and"
            " decides whether the queue stays paused"
        )

    @classmethod
    def by_resuming(cls, queue: str) -> PurgeEnded:
        return cls(
            f"queue {queue!r}: it was resumed during the purge, so the purge has ended early: purge it again to"
            " complete it"
        )


@contextmanager
def naming_the_pause(queue: str, *, certain: bool = True) -> Iterator[None]:
    """Add to errors that the queue is still paused, because the next purge cannot know which purge paused it.

    ``certain=False`` is for the pause itself: after an error, the queue may be paused.
    """
    # A ConfigError refuses a pause before it is written.
    unchanged = PurgeEnded if certain else ConfigError
    try:
        yield
    except unchanged:
        raise
    except MarqError as error:
        state = "is" if certain else "may be"
        error.args = (f"{error}; queue {queue!r} {state} paused: purge it again, then resume it",)
        raise
