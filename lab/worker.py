"""A worker that writes its history: ``python -m lab.worker NAME HISTORY [--die-at POINT]``, then as Faust.

It records when it takes over a markers partition and what it decides before it writes. It can kill itself with -9 after
the broker has the copies and facts of its n-th firing, and before their transaction is committed (``in-transaction``).
The same before and after it commits its n-th answer to a RESUME (``in-answer``, ``after-answer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from faust.cli.faust import cli

from lab.proof import history
from lab.recorder import Recorder, around, install, options_parser
from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import DueAction
from marq.owner.engine import OwnerTransaction
from marq.wire.markers import Batch, Resumed, Source, Tick
from marq_worker.owner.ownership import Ownership


class WatchedOwners:
    """Records the actions of the owners of markers partitions."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: Offset of the newest TICK of each tracker that was read, by holder.
        self._ticks: dict[int, int] = {}

    def install(self) -> None:
        """Wrap Marq's functions in this process."""
        around(Ownership, "_take_over", self._take_over)
        around(Ownership, "perform", self._perform)
        around(Ownership, "_halt", self._halt)
        around(LeaseBook, "fold", self._fold)

    async def _take_over(self, take_over: Any, owner: Ownership) -> None:
        await take_over(owner)
        # It writes its first TICK after this, behind the current end.
        _, end = await owner.context.log_range(owner.partition)
        self._ticks.pop(owner.tracker.holder, None)
        holder, position = history.holder_name(owner.tracker.holder), owner.position
        self._recorder.add("ok", "own", holder=holder, log=_log(owner), fenced_at=end, position=position)

    async def _perform(self, perform: Any, owner: Ownership, write: OwnerTransaction) -> None:
        self._note_fires(owner, [fire for fire, _ in write.due])
        answers = sum(isinstance(batch, Resumed) for batch in write.markers)
        points = ["in-transaction"] * bool(write.due) + ["in-answer"] * answers
        if any(self._recorder.reaches(point) for point in points):
            self._die_before_commit(owner)
        await perform(owner, write)
        for _ in range(answers):
            self._recorder.at("after-answer")

    async def _halt(self, halt: Any, owner: Ownership, alarm: str) -> None:
        self._recorder.add("ok", "halt", log=_log(owner), reason=alarm)
        await halt(owner, alarm)

    def _fold(self, fold: Any, book: LeaseBook, batch: Batch, append_time_ms: int, offset: int) -> int:
        if isinstance(batch, Tick):
            self._ticks[batch.holder] = offset
        jump_ms: int = fold(book, batch, append_time_ms, offset)
        return jump_ms

    def _note_fires(self, owner: Ownership, fires: Sequence[DueAction]) -> None:
        tracker = owner.tracker
        holder, tick = history.holder_name(tracker.holder), self._ticks.get(tracker.holder)
        for fire in fires:
            self._recorder.add(
                "invoke", "fire", holder=holder, queue=fire.lease.queue, source=history.log_name(fire.source),
                offset=fire.offset, kind=fire.fact_kind.name, attempt=fire.attempt, cause=fire.cause.name,
                log=_log(owner), applied=tracker.book.applied, tick=tick,
            )  # fmt: skip

    def _die_before_commit(self, owner: Ownership) -> None:
        producer = owner._writer.producer
        assert producer is not None

        async def commit_transaction() -> None:
            self._recorder.die()

        producer.commit_transaction = commit_transaction


def _log(owner: Ownership) -> str:
    return history.log_name(Source(owner.context.names.markers, owner.partition))


def main() -> None:
    options = options_parser("python -m lab.worker", __doc__).parse_args()
    WatchedOwners(Recorder(options.name, options.history, options.die_at, options.die_after)).install()
    install(options.install)
    cli(["-A", "app", "worker", "-l", "info"])


if __name__ == "__main__":
    main()
