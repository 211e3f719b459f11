"""Whether the messages of queues with ordering were delivered in the order of their keys, and redelivered in place.

A line has the records of one ordering key in one source. A record without a key is a line of its own. A delivery is
judged by the markers log at that moment, if the history says where the log ended then, or what its time was. Otherwise
it is judged by what clients had requested, which is weaker: an outcome is requested before it is durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from lab.proof.causes import Why, is_hindered
from lab.proof.evidence import CLOCKS, EVERYBODY, Evidence, HandlerDelivery, MarkersLog, TrackerFact, Trail
from lab.proof.fold import (
    CANCELLED,
    DELIVERED,
    HOLDER_BITS,
    IN_ORDER,
    LEASED,
    LEASED_IN_ORDER,
    REDELIVERED,
    WAITING_IN_ORDER,
    Standing,
    comes_after,
)
from marq.wire.names import is_synthetic

_LEASED = (LEASED, LEASED_IN_ORDER)
_IN_PLACE = (*_LEASED, WAITING_IN_ORDER)


class _Moment(NamedTuple):
    """A delivery, and where its log ended then."""

    delivery: HandlerDelivery
    trail: Trail
    end: int

    def __str__(self) -> str:
        return f"{self.trail} (event {self.delivery.number}, log end {self.end})"


def judge_lines(evidence: Evidence) -> None:
    lines: dict[tuple[str, str, str], list[Trail]] = {}
    for trail in evidence.trails.values():
        if trail.queue in evidence.ordered and trail.id:
            _judge_copies(evidence, trail)
            _judge_attempts(evidence, trail)
            if not trail.redriven and trail.queue not in evidence.limited:
                lines.setdefault((trail.queue, trail.source, trail.line or trail.place), []).append(trail)
    _judge_places(evidence, lines)
    for trails in lines.values():
        trails.sort(key=lambda trail: trail.offset)
        if any(trail.deliveries for trail in trails):
            _Line(evidence, trails).judge()


class _Line:
    """One line, with its records in the order of their offsets."""

    def __init__(self, evidence: Evidence, trails: Sequence[Trail]) -> None:
        self._evidence = evidence
        self._find = evidence.report.find
        self._trails = trails

    def judge(self) -> None:
        moments = [
            (delivery, index)
            for index, trail in enumerate(self._trails)
            for delivery in _deliveries(self._evidence, trail)
        ]
        moments.sort(key=lambda moment: moment[0].number)
        ends = [_ended_at(trail) for trail in self._trails]
        #: The latest end of all messages before each.
        latest = list(accumulate(ends, max, initial=-1.0))
        exact: list[_Moment] = []
        for delivery, index in moments:
            trail = self._trails[index]
            end = delivery.log_end
            moment = _Moment(delivery, trail, -1 if end is None else end)
            if end is None or latest[index] >= end:
                self._judge_order(moment, self._trails[:index], end)
            if end is None:
                continue
            # Its consumer may not know yet that a purge has ended messages in flight.
            purged = trail.offset < self._evidence.purges_in_flight.get((trail.queue, trail.source), 0)
            before = [standing for offset, standing in trail.changes if offset < end and standing is not None]
            if not purged and any(standing.state == CANCELLED for standing in before):
                self._find("cancelled", f"{moment}: it was cancelled", trail.events)
            if ends[index] < int(delivery.holder, 16) >> HOLDER_BITS:
                text = f"{moment}: its consumer resumed after its end at {ends[index]}"
                self._find("order", text, trail.events)
            exact.append(moment)
        self._judge_exclusion(exact)

    def _log(self, trail: Trail) -> MarkersLog | None:
        return self._evidence.logs.get(trail.log)

    # --- order --------------------------------------------------------------------------------------------------------

    def _judge_order(self, moment: _Moment, earlier: Sequence[Trail], end: int | None) -> None:
        """Judge that each earlier message had ended, or that its end was asked for if the end of the log is unknown."""
        for trail in earlier:
            ended_at, waits = _ended_at(trail), True
            if end is not None:
                waits = ended_at >= end
            elif trail.finish_at is not None:
                waits = trail.finish_at > moment.delivery.number
            else:
                # The moment of an end that no client requested is unknown.
                waits = ended_at == inf
            if waits and not self._excuse(trail, moment.delivery, end):
                text = f"{moment}: {trail} of its line ended at {ended_at}, its end was asked for by {trail.finish_at}"
                self._find("order", text, [*trail.events, *moment.trail.events])

    def _excuse(self, trail: Trail, delivery: HandlerDelivery, end: int | None) -> bool:
        """Whether a delivery need not wait for an earlier message that has not ended."""
        known = bool(trail.changes) and (end is None or trail.changes[0][0] < end)
        # Open messages whose records are gone are redelivered behind all others.
        excused = self._is_gone(trail, delivery) or self._evidence.is_purged_unread(trail)
        return excused or not (known or trail.committed)

    def _is_gone(self, trail: Trail, delivery: HandlerDelivery) -> bool:
        """Whether retention had removed a record before a delivery."""
        truncations = self._evidence.truncations.get(trail.source, ())
        return any(number < delivery.number and start > trail.offset for number, start in truncations)

    # --- exclusion ----------------------------------------------------------------------------------------------------

    def _judge_exclusion(self, moments: Sequence[_Moment]) -> None:
        """Judge that no message of the line is delivered while one is in flight."""
        in_flight: list[_Moment] = []
        for moment in moments:
            in_flight = [former for former in in_flight if not self._is_over(former, moment)]
            for former in in_flight:
                if not self._is_stale(moment):
                    text = f"{moment}: {former} is in flight"
                    self._find("exclusion", text, [*former.trail.events, *moment.trail.events])
            if _held(moment.trail, moment.delivery.holder, moment.end) is not None:
                # One violation is enough.
                in_flight = [moment]

    def _is_over(self, former: _Moment, now: _Moment) -> bool:
        """Whether a delivered message had ended or been released, or its lease was over, when another was delivered."""
        trail, holder = former.trail, former.delivery.holder
        log, standing = self._log(trail), _held(trail, holder, former.end)
        if log is None or standing is None or self._is_lost(former, now) or self._is_gone(trail, now.delivery):
            return True
        gave_up = _gave_up(trail, former.delivery, now.delivery)
        due_ms, since = standing.due_ms, former.end
        for offset, standing in trail.changes:
            if offset < former.end:
                continue
            if offset >= now.end:
                break
            if log.clock.latest(since, offset + 1, -1) >= due_ms or standing is None:
                return True
            if standing.state not in _LEASED and (gave_up or standing.state != WAITING_IN_ORDER):
                # WAITING_IN_ORDER without a request comes from an earlier release of its holder, written late.
                return True
            if standing.holder == holder and standing.state in _LEASED:
                due_ms, since = standing.due_ms, offset
        return log.clock.latest(since, now.end, now.delivery.time_ms) >= due_ms

    def _is_lost(self, former: _Moment, now: _Moment) -> bool:
        """Whether the same process delivers the same message again, because its own clock says that the lease is over.

        A RENEW of unknown outcome may have made the lease longer in the log.
        """
        processes = {self._evidence.process_of.get(moment.delivery.holder) for moment in (former, now)}
        again = now.trail is former.trail and now.delivery.attempt >= former.delivery.attempt
        if again and now.delivery.attempt == former.delivery.attempt:
            again = not _is_started(now.trail, former.delivery, now.delivery)
        return again and len(processes) == 1

    def _is_stale(self, moment: _Moment) -> bool:
        """Whether a consumer delivered a message without a lease, because of a clock."""
        log = self._log(moment.trail)
        standing = _held(moment.trail, moment.delivery.holder, moment.end)
        if log is None:
            return False
        if standing is not None and log.clock.latest(moment.end, moment.end, moment.delivery.time_ms) < standing.due_ms:
            return False
        return _is_clock_wrong(self._evidence, moment.trail, moment.delivery)


def _deliveries(evidence: Evidence, trail: Trail) -> Sequence[HandlerDelivery]:
    """Return a message's deliveries, each with the end of its markers log if that or the time is known."""
    log = evidence.logs.get(trail.log)
    if log is None:
        return trail.deliveries
    return [
        one if one.log_end is not None or one.time_ms < 0 else one._replace(log_end=log.clock.end_at(one.time_ms))
        for one in trail.deliveries
    ]


def _is_clock_wrong(evidence: Evidence, trail: Trail, delivery: HandlerDelivery) -> bool:
    """Whether a consumer may have taken an ended lease for valid."""
    names = (trail.log, evidence.process_of.get(delivery.holder, ""), EVERYBODY)
    return bool(evidence.befell(*names) & CLOCKS)


def _ended_at(trail: Trail) -> float:
    """Return the offset from which its line could continue: of its end, its reject, or its last release."""
    for offset, standing in trail.changes:
        if standing is None or standing.state not in _IN_PLACE:
            return offset
    return inf


def _held(trail: Trail, holder: str, end: int) -> Standing | None:
    """Return a message's standing before an offset if this holder had leased it."""
    standing = trail.at(end - 1)
    return standing if standing is not None and standing.state in _LEASED and standing.holder == holder else None


def _judge_places(evidence: Evidence, lines: Mapping[tuple[str, str, str], Sequence[Trail]]) -> None:
    """Judge that the records of an ordering key are in one partition: there is no order across partitions.

    A history in which a queue with ordering moves to other partitions, which it may while it is empty, does not pass.
    """
    sources: dict[tuple[str, str, str], set[str]] = {}
    for (queue, source, line), trails in lines.items():
        if any(trail.began for trail in trails):
            sources.setdefault((queue, line, trails[0].topic), set()).add(source)
    for (queue, source, line), trails in lines.items():
        used = sources.get((queue, line, trails[0].topic), {source})
        if trails[0].line and used != {source}:
            text = f"{trails[0]}: its ordering key is in {', '.join(sorted(used))}"
            evidence.report.find("misplaced", text, trails[0].events)


# --- redeliveries -----------------------------------------------------------------------------------------------------


def _judge_copies(evidence: Evidence, trail: Trail) -> None:
    """Judge that a message is redelivered in its place unless its record is no longer in the source."""
    for fact in trail.facts:
        early = (trail.began and trail.deliver_at_ms is not None) or trail.redriven or is_synthetic(trail.place)
        delayed = fact.kind == DELIVERED and early
        if fact.kind in (REDELIVERED, DELIVERED) and not is_resumed(evidence, trail, fact) and not delayed:
            evidence.report.find("no-copy", f"{trail}: {fact.kind} at {fact.offset}", trail.events)
    root = evidence.trails.get((trail.queue, trail.id))
    if root is None or root is trail or trail.redriven or is_synthetic(root.place):
        return
    if trail.line != root.line:
        text = f"{trail}: its line is {trail.line}, of {root} {root.line}"
        evidence.report.find("fidelity", text, [*root.events, *trail.events])


def _judge_attempts(evidence: Evidence, trail: Trail) -> None:
    """Judge that each delivery in place is another attempt, unless a release that does not count came before."""

    def find(text: str) -> None:
        evidence.report.find("attempts", f"{trail}: {text}", trail.events)

    deliveries = _deliveries(evidence, trail)
    for former, delivery in pairwise(deliveries):
        again = _released(trail, former, delivery)
        # A release of a message that a former holder has acknowledged meanwhile changes nothing in the log.
        counted = _is_started(trail, former, delivery) if again is None else again.counted
        if delivery.attempt < former.attempt + counted and not _is_clock_wrong(evidence, trail, delivery):
            find(f"attempt {delivery.attempt} in event {delivery.number}, after {former.attempt}")
    for fact in trail.facts:
        # A consumer that asked before a late rejection may deliver the message after it.
        ended_at = max((offset for offset, _ in trail.changes if offset < fact.offset), default=-1)
        # Where the log ended by its time may be too late, and would excuse the delivery.
        earlier = [one for one in trail.deliveries if one.log_end is None or one.log_end <= ended_at]
        most = max((one.attempt for one in earlier if not _is_uncounted(trail, one)), default=0)
        if fact.kind == "DEAD_LETTERED" and fact.attempt < most and fact.before is not None:
            find(f"a dead letter of attempt {fact.attempt}, although {most} was delivered")
    limits = evidence.may_be(trail.queue, "max_attempts")
    last = max((limit for limit in limits if limit is not None), default=inf)
    for delivery in deliveries:
        if not trail.attempt <= delivery.attempt <= max(last, trail.attempt):
            find(f"attempt {delivery.attempt} in event {delivery.number}, limits {limits}")


def _released(trail: Trail, former: HandlerDelivery, delivery: HandlerDelivery) -> Standing | None:
    """Return a delivered message's standing after its holder released it and before its next delivery."""
    before: Standing | None = None
    for offset, standing in trail.changes:
        if delivery.log_end is not None and offset >= delivery.log_end:
            break
        held = before is not None and before.holder == former.holder and before.attempt == former.attempt
        if held and standing is not None and standing.state == WAITING_IN_ORDER:
            return standing
        before = standing
    return None


def _is_started(trail: Trail, former: HandlerDelivery, delivery: HandlerDelivery) -> bool:
    """Whether the log says that user code had a delivered message when its lease ended, before its next delivery."""
    if _gave_up(trail, former, delivery):
        return False
    held = [
        standing
        for offset, standing in trail.changes
        if (delivery.log_end is None or offset < delivery.log_end)
        and standing is not None
        and standing.state in _LEASED
        and (standing.holder, standing.attempt) == (former.holder, former.attempt)
    ]
    # A consumer acquires a message again under its old holder, and with the same attempt if that did not count.
    former_lease = [standing for standing in held if standing.since_ms < held[-1].since_ms] or held
    return bool(former_lease) and former_lease[-1].counted


def _is_uncounted(trail: Trail, delivery: HandlerDelivery) -> bool:
    """Whether the log says that the attempt of a delivery never counted."""
    place = delivery.holder, delivery.attempt
    counted = [
        standing.counted
        for _, standing in trail.changes
        if standing is not None and (standing.holder, standing.attempt) == place
    ]
    return bool(counted) and not any(counted)


def _gave_up(trail: Trail, former: HandlerDelivery, until: HandlerDelivery) -> bool:
    """Whether the holder of a delivery asked to release or reject the message, before another delivery."""
    return any(holder == former.holder and former.number < number < until.number for number, holder in trail.gave_up)


def redelivered_in_place(evidence: Evidence, trail: Trail) -> tuple[int, list[Why]]:
    """Return how many deliveries followed a release, and the causes of the others."""
    asked, causes = 0, list[Why]()
    if trail.queue not in evidence.ordered:
        return asked, causes
    for former, delivery in pairwise(_deliveries(evidence, trail)):
        if _released(trail, former, delivery) is not None or _gave_up(trail, former, delivery):
            asked += 1
        elif (why := _why(evidence, trail, former, delivery)) is not None:
            causes.append(why)
    return asked, causes


def _why(evidence: Evidence, trail: Trail, former: HandlerDelivery, delivery: HandlerDelivery) -> Why | None:
    """Return why a message was delivered again that its holder had not released."""
    if not comes_after(delivery.holder, former.holder):
        # Its holder did not notice that its lease had ended; both attempts may have the same number.
        if not _is_clock_wrong(evidence, trail, delivery):
            return None
        return Why.CLOCK if evidence.befell(trail.log) & CLOCKS else Why.LEASE_ENDED
    since = max([number for number, holder in trail.acquires if holder == former.holder], default=former.number)
    names = (evidence.process_of.get(former.holder, ""), EVERYBODY)
    befell = evidence.befell(*names, since=min(since, former.number), until=delivery.number)
    if "kill" in befell:
        return Why.KILLED
    if is_hindered(trail, befell):
        return Why.LEASE_ENDED if trail.acked_at is None else Why.ACK_TOO_LATE
    return Why.CLOCK if evidence.befell(*names, trail.log, until=delivery.number) & CLOCKS else None


def is_resumed(evidence: Evidence, trail: Trail, fact: TrackerFact) -> bool:
    """Whether a consumer resumed after a record, which is no longer in the source."""
    resumes = evidence.resumes.get((trail.queue, trail.source), ())
    return any(at < fact.offset and start > trail.offset for at, start in resumes)


def is_stranded(evidence: Evidence, trail: Trail, standing: Standing | None) -> bool:
    """Whether a message waits in vain: its tracker has stopped, or its record is gone.

    A message in order whose record is gone is redelivered when a consumer resumes its source at a later record.
    """
    if standing is not None:
        gone = standing.state in IN_ORDER and trail.offset < evidence.starts.get(trail.source, 0)
        return gone or bool(evidence.logs[trail.log].halted)
    # Never read, because its reader has to ask the tracker first; other queues of the source wait, too.
    log = evidence.logs.get(evidence.log_of.get(trail.source, ""))
    return bool(evidence.ordered) and log is not None and bool(log.halted)
