"""Marker batches for the tests of the core: short builders, and hypothesis strategies of every kind."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from marq.core.storage.rows import State
from marq.wire.markers import (
    ANY_QUEUE,
    FACTS,
    LAST,
    NOW,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Cause,
    Delay,
    Discard,
    Dispatch,
    Fact,
    Kind,
    MixedAcquire,
    Payload,
    Purge,
    Reject,
    Release,
    Renew,
    RequestOutcome,
    Reschedule,
    Resume,
    Resumed,
    Source,
    Tick,
)
from marq.wire.names import synthetic_topic
from marq.wire.ordered_holders import ordered_holder

SOURCE = Source("marq.messages", 0)
#: Source of messages that their sender delayed.
DRAWN = Source(synthetic_topic(5), 2)
#: Source of dead letters.
LETTERS = Source("marq.dead-letters", 1)
QUEUE = "emails"
HOLDER, OTHER = 7, 8
#: Holders of ordered messages, whose RESUMEs are at these offsets of the log.
FORMER, LATER = ordered_holder(10, 5), ordered_holder(20, 3)
LEASE_MS = 1_000

#: An ACK of version 2 by holder 1, of queue "emails", with what that version may say.
NEWER = b"\x02mq\x03\x00" + (1).to_bytes(8, "big") + b"\x06emails" + b"more"


def payload(attempt: int = 1, value: bytes | None = b"v", headers: Sequence[tuple[str, bytes | None]] = ()) -> Payload:
    return Payload(1_700_000_000_000, attempt, QUEUE.encode(), tuple(headers), value)


def acquire(
    offsets: Sequence[int],
    *,
    holder: int = HOLDER,
    attempt: int = 1,
    lease_ms: int = LEASE_MS,
    from_offset: int | None = None,
    queue: str = QUEUE,
    source: Source = SOURCE,
    in_order: bool = False,
    dues_ms: Sequence[int] | None = None,
) -> Acquire:
    start = offsets[0] if from_offset is None else from_offset
    payloads = [payload(attempt)] * len(offsets)
    return Acquire(queue, holder, source, offsets, lease_ms, start, payloads, dues_ms, in_order)


def ordered(
    offsets: Sequence[int],
    *,
    holder: int = FORMER,
    attempt: int = 1,
    from_offset: int | None = None,
    source: Source = SOURCE,
) -> Acquire:
    return acquire(offsets, holder=holder, attempt=attempt, from_offset=from_offset, source=source, in_order=True)


def resume(
    offsets: Sequence[int], *, onwards: bool = True, holder: int = OTHER, queue: str = QUEUE, source: Source = SOURCE
) -> Resume:
    return Resume(queue, holder, source, offsets, onwards)


def renew(offsets: Sequence[int], *, holder: int = HOLDER, lease_ms: int = LEASE_MS) -> Renew:
    return Renew(QUEUE, holder, SOURCE, offsets, lease_ms)


def spend(offsets: Sequence[int], *, holder: int = HOLDER, lease_ms: int = LEASE_MS) -> Dispatch:
    return Dispatch(QUEUE, holder, SOURCE, offsets, lease_ms)


def ack(offsets: Sequence[int], *, holder: int = HOLDER) -> Ack:
    return Ack(QUEUE, holder, SOURCE, offsets)


def release(
    offsets: Sequence[int], delay_ms: int = 0, *, holder: int = HOLDER, counted: bool = True, error: str = ""
) -> Release:
    return Release(QUEUE, holder, SOURCE, offsets, [delay_ms] * len(offsets), counted, [error] * len(offsets))


def reject(offsets: Sequence[int], *, holder: int = HOLDER, reason: str = "no good") -> Reject:
    return Reject(QUEUE, holder, SOURCE, offsets, [reason] * len(offsets))


def delay(
    offsets: Sequence[int],
    times_ms: Sequence[int],
    *,
    relative: bool = True,
    from_offset: int | None = None,
    source: Source = DRAWN,
    queue: str = QUEUE,
) -> Delay:
    return Delay(queue, HOLDER, source, offsets, times_ms, relative, from_offset, [payload()] * len(offsets))


def reschedule(
    offsets: Sequence[int], time_ms: int, *, relative: bool = True, source: Source = DRAWN, holder: int = OTHER
) -> Reschedule:
    return Reschedule(QUEUE, holder, source, offsets, [time_ms] * len(offsets), relative)


def cancel(offsets: Sequence[int], *, source: Source = DRAWN, holder: int = OTHER) -> Cancel:
    return Cancel(QUEUE, holder, source, offsets)


def redrive(offsets: Sequence[int], *, source: Source = LETTERS, holder: int = OTHER, queue: str = QUEUE) -> Delay:
    times_ms = [0] * len(offsets)
    return Delay(queue, holder, source, offsets, times_ms, True, offsets[0], [payload()] * len(offsets))


def discard(offsets: Sequence[int], *, source: Source = LETTERS, holder: int = OTHER) -> Discard:
    return Discard(QUEUE, holder, source, offsets)


def fact(offsets: Sequence[int], kind: Kind = Kind.REDELIVERED, cause: Cause = Cause.EXPIRED) -> Fact:
    return Fact(kind, QUEUE, 99, SOURCE, offsets, [2] * len(offsets), [cause] * len(offsets))


# --- strategies -------------------------------------------------------------------------------------------------------

U32, U64, I64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
any_sources = st.builds(Source, st.text(max_size=60).filter(lambda topic: len(topic.encode()) < 256), U32)
#: Queue, holder and source.
_head = (st.text(max_size=40), U64, any_sources)
#: At most MAX_TEXT_BYTES, so that nothing is cut.
_texts = st.text(max_size=30)
_headers = st.lists(st.tuples(st.text(max_size=10), st.none() | st.binary(max_size=10)), max_size=3).map(tuple)
_offsets = st.tuples(
    st.integers(0, 2**62), st.one_of(st.just([1]), st.lists(st.integers(1, 1_000), min_size=1, max_size=6))
).map(lambda start: tuple(start[0] + sum(start[1][:index]) for index in range(len(start[1]))))
_whole_payloads = st.builds(
    Payload,
    I64,
    U32,
    st.none() | st.binary(max_size=8),
    _headers,
    st.none() | st.binary(),
    st.just(False),
)
#: Whole, or only in their records.
any_payloads = _whole_payloads | st.builds(Payload, I64, U32, st.none(), st.just(()), st.none(), st.just(True))


def _column(values: st.SearchStrategy[object], offsets: Sequence[int]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.tuples(*[values] * len(offsets))


def _acquire_of(offsets: tuple[int, ...]) -> st.SearchStrategy[Acquire]:
    start, payloads = st.integers(0, offsets[0]), _column(any_payloads, offsets)
    dues = st.none() | _column(st.integers(NOW, 2**63 - 1), offsets)
    return st.builds(Acquire, *_head, st.just(offsets), U32, start, payloads, dues, st.booleans())


def _mixed_acquire_of(offsets: tuple[int, ...]) -> st.SearchStrategy[MixedAcquire]:
    names = st.text(min_size=1, max_size=40)
    known = st.tuples(*[st.integers(0, offset) for offset in offsets])
    columns = _column(names, offsets), known, _column(I64, offsets)
    return st.builds(MixedAcquire, st.just(ANY_QUEUE), U64, any_sources, st.just(offsets), U32, *columns, st.booleans())


def _resumed_of(offsets: tuple[int, ...]) -> st.SearchStrategy[Resumed]:
    acquired = st.sets(st.integers(0, 2**63 - 1), max_size=6).map(_intervals)
    states = _column(st.sampled_from([0, *State]).map(int), offsets)
    counts, errors = _column(U32, offsets), _column(_texts, offsets)
    return st.builds(
        Resumed, *_head, st.just(offsets), st.integers(0, 2**62), U32, acquired, states, counts, counts, errors
    )


def _intervals(numbers: set[int]) -> tuple[tuple[int, int], ...]:
    ends = sorted(numbers)
    return tuple(zip(ends[::2], ends[1::2], strict=False))


def _with_offsets(offsets: tuple[int, ...]) -> st.SearchStrategy[Batch]:
    head = (*_head, st.just(offsets))
    start, payloads = st.none() | st.integers(0, offsets[0]), _column(_whole_payloads, offsets)
    times, texts = _column(st.integers(0, 2**63 - 1), offsets), _column(_texts, offsets)
    outcomes, causes = (
        _column(st.sampled_from([*enumeration]).map(int), offsets) for enumeration in (RequestOutcome, Cause)
    )
    return st.one_of(
        _acquire_of(offsets),
        _mixed_acquire_of(offsets),
        _resumed_of(offsets),
        st.builds(Resume, *head, st.booleans()),
        st.builds(Purge, *_head, st.tuples(st.integers(0, 2**62)), st.booleans(), st.booleans()),
        *[st.builds(kind, *head, U32) for kind in (Renew, Dispatch)],
        *[st.builds(kind, *head) for kind in (Ack, Cancel, Discard)],
        st.builds(Release, *head, _column(st.integers(LAST, 2**63 - 1), offsets), st.booleans(), texts),
        st.builds(Reject, *head, texts),
        st.builds(Delay, *head, times, st.booleans(), start, payloads),
        st.builds(Reschedule, *head, times, st.booleans()),
        st.builds(Answer, *head, outcomes),
        st.builds(Fact, st.sampled_from(FACTS), *head, _column(U32, offsets), causes),
    )


ticks = st.builds(Tick, U64, U64)
acquires = _offsets.flatmap(_acquire_of)
batches = st.one_of(ticks, _offsets.flatmap(_with_offsets))
