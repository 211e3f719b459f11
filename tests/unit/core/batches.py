"""Marker batches for the tests of the core: short builders, and hypothesis strategies of every kind."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from marq.core.markers import (
    BACKOFF,
    Ack,
    Acquire,
    Batch,
    Cause,
    Fact,
    Kind,
    Payload,
    Reject,
    Release,
    Renew,
    Source,
    Tick,
)

SOURCE = Source("marq.messages", 0)
QUEUE = "emails"
HOLDER, OTHER = 7, 8
LEASE_MS = 1_000


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
) -> Acquire:
    start = offsets[0] if from_offset is None else from_offset
    return Acquire(queue, holder, source, offsets, lease_ms, start, [payload(attempt)] * len(offsets))


def renew(offsets: Sequence[int], *, holder: int = HOLDER, lease_ms: int = LEASE_MS) -> Renew:
    return Renew(QUEUE, holder, SOURCE, offsets, lease_ms)


def ack(offsets: Sequence[int], *, holder: int = HOLDER) -> Ack:
    return Ack(QUEUE, holder, SOURCE, offsets)


def release(
    offsets: Sequence[int], delay_ms: int = 0, *, holder: int = HOLDER, counted: bool = True, error: str = ""
) -> Release:
    return Release(QUEUE, holder, SOURCE, offsets, [delay_ms] * len(offsets), counted, [error] * len(offsets))


def reject(offsets: Sequence[int], *, holder: int = HOLDER, reason: str = "no good") -> Reject:
    return Reject(QUEUE, holder, SOURCE, offsets, [reason] * len(offsets))


def fact(offsets: Sequence[int], kind: Kind = Kind.REDELIVERED, cause: Cause = Cause.EXPIRED) -> Fact:
    return Fact(kind, QUEUE, 99, SOURCE, offsets, [2] * len(offsets), [cause] * len(offsets))


# --- strategies -------------------------------------------------------------------------------------------------------

_U32, _U64, _I64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
_names = st.text(max_size=40)
_sources = st.builds(Source, st.text(max_size=60).filter(lambda topic: len(topic.encode()) < 256), _U32)
#: At most MAX_TEXT_BYTES, so that nothing is cut.
_texts = st.text(max_size=30)
_headers = st.lists(st.tuples(st.text(max_size=10), st.none() | st.binary(max_size=10)), max_size=3).map(tuple)
_offsets = st.tuples(
    st.integers(0, 2**62), st.one_of(st.just([1]), st.lists(st.integers(1, 1_000), min_size=1, max_size=6))
).map(lambda start: tuple(start[0] + sum(start[1][:index]) for index in range(len(start[1]))))
_payloads = st.builds(
    Payload, _I64, st.integers(0, 2**32 - 1), st.none() | st.binary(max_size=8), _headers, st.none() | st.binary()
)


def _column(values: st.SearchStrategy[object], offsets: Sequence[int]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.tuples(*[values] * len(offsets))


def _acquire_of(offsets: tuple[int, ...]) -> st.SearchStrategy[Acquire]:
    start, payloads = st.integers(0, offsets[0]), _column(_payloads, offsets)
    return st.builds(Acquire, _names, _U64, _sources, st.just(offsets), _U32, start, payloads)


def _with_offsets(offsets: tuple[int, ...]) -> st.SearchStrategy[Batch]:
    same = st.just(offsets)
    return st.one_of(
        _acquire_of(offsets),
        st.builds(Renew, _names, _U64, _sources, same, _U32),
        st.builds(Ack, _names, _U64, _sources, same),
        st.builds(
            Release,
            _names,
            _U64,
            _sources,
            same,
            _column(st.integers(BACKOFF, 2**63 - 1), offsets),
            st.booleans(),
            _column(_texts, offsets),
        ),
        st.builds(Reject, _names, _U64, _sources, same, _column(_texts, offsets)),
        st.builds(
            Fact,
            st.sampled_from([Kind.REDELIVERED, Kind.DEAD_LETTERED]),
            _names,
            _U64,
            _sources,
            same,
            _column(_U32, offsets),
            _column(st.sampled_from([*Cause]).map(int), offsets),
        ),
    )


ticks = st.builds(Tick, _U64, _U64)
acquires = _offsets.flatmap(_acquire_of)
batches = st.one_of(ticks, _offsets.flatmap(_with_offsets))
