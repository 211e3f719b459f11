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
def naming_the_pause(queue: str) -> Iterator[None]:
    """Add to errors that the queue is still paused, because the next purge cannot know which purge paused it."""
    try:
        yield
    except PurgeEnded:
        raise
    except MarqError as error:
        error.args = (f"{error}; queue {queue!r} is paused: purge it again, then resume it",)
        raise


@contextmanager
def naming_a_possible_pause(queue: str) -> Iterator[None]:
    """Add to errors of the pause that the queue may be paused."""
    try:
        yield
    except ConfigError:
        # The pause was refused before it was written.
        raise
    except MarqError as error:
        error.args = (f"{error}; queue {queue!r} may be paused: purge it again, then resume it",)
        raise
