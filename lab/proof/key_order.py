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

from lab.proof.causes import is_hindered
from lab.proof.evidence import CLOCKS, EVERYBODY, Evidence, HandlerDelivery, TrackerFact, Trail
from lab.proof.findings import Why
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

#: The causes of dead letters whose messages the tracker can't deliver again.
LOST_VALUES = ("TOO_LARGE", "GONE")


class _Moment(NamedTuple):
    """A delivery, and where its log ended then."""

    delivery: HandlerDelivery
    trail: Trail
    end: int

    def __str__(self) -> str:
        return f"{self.trail} (event {self.delivery.number}, log end {self.end})"

    @property
    def events(self) -> list[int]:
        return self.trail.events

    @property
    def lease(self) -> Standing | None:
        """The message's standing before the offset ``end`` if its holder had leased it."""
        standing = self.trail.at(self.end - 1)
        leased = standing is not None and standing.state in _LEASED and standing.holder == self.delivery.holder
        return standing if leased else None


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
            _judge_line(evidence, trails)


def _judge_line(evidence: Evidence, trails: Sequence[Trail]) -> None:
    """Judge one line, whose records are in the order of their offsets."""
    moments = [(delivery, index) for index, trail in enumerate(trails) for delivery in _deliveries(evidence, trail)]
    moments.sort(key=lambda moment: moment[0].number)
    ends = [_ended_at(trail) for trail in trails]
    #: The latest end of all messages before each.
    latest = list(accumulate(ends, max, initial=-1.0))
    exact: list[_Moment] = []
    for delivery, index in moments:
        trail = trails[index]
        end = delivery.log_end
        moment = _Moment(delivery, trail, -1 if end is None else end)
        if end is None or latest[index] >= end:
            _judge_order(evidence, moment, trails[:index], end)
        if end is None:
            continue
        # Its consumer may not know yet that a purge has ended messages in flight.
        purged = trail.offset < evidence.purges_in_flight.get((trail.queue, trail.source), 0)
        if not purged and any(standing.state == CANCELLED for standing in trail.standings(end)):
            evidence.report.find("cancelled", moment, "it was cancelled")
        if ends[index] < int(delivery.holder, 16) >> HOLDER_BITS:
            evidence.report.find("order", moment, f"its consumer resumed after its end at {ends[index]}")
        exact.append(moment)
    _judge_exclusion(evidence, exact)


# --- order ------------------------------------------------------------------------------------------------------------


def _judge_order(evidence: Evidence, moment: _Moment, earlier: Sequence[Trail], end: int | None) -> None:
    """Judge that each earlier message had ended, or that its end was asked for if the end of the log is unknown."""
    for trail in earlier:
        ended_at, requests = _ended_at(trail), trail.requested("ack", "release", "reject")
        if end is None:
            # The moment of an end that no client requested is unknown.
            waits = requests[0] > moment.delivery.number if requests else ended_at == inf
        else:
            waits = ended_at >= end
        if waits and not _excuse(evidence, trail, moment.delivery, end):
            text = f"{trail} of its line ended at {ended_at}, its end was asked for by {requests[:1]}"
            evidence.report.find("order", moment, text, trail)


def _excuse(evidence: Evidence, trail: Trail, delivery: HandlerDelivery, end: int | None) -> bool:
    """Whether a delivery need not wait for an earlier message that has not ended."""
    known = bool(trail.changes) and (end is None or trail.changes[0][0] < end)
    # Open messages whose records are gone are redelivered behind all others.
    excused = evidence.is_removed(trail, delivery.number) or evidence.is_purged_unread(trail)
    return excused or not (known or trail.committed)


# --- exclusion --------------------------------------------------------------------------------------------------------


def _judge_exclusion(evidence: Evidence, moments: Sequence[_Moment]) -> None:
    """Judge that no message of the line is delivered while one is in flight."""
    former: _Moment | None = None
    for moment in moments:
        if former is not None and _is_over(evidence, former, moment):
            former = None
        if former is not None and not _is_stale(evidence, moment):
            evidence.report.find("exclusion", moment, f"{former} is in flight", former)
        if moment.lease is not None:
            # One violation is enough.
            former = moment


def _is_over(evidence: Evidence, former: _Moment, now: _Moment) -> bool:
    """Whether a delivered message had ended or been released, or its lease was over, when another was delivered."""
    trail, holder, lease = former.trail, former.delivery.holder, former.lease
    if lease is None or evidence.is_removed(trail, now.delivery.number) or _is_lost(evidence, former, now):
        return True
    gave_up, log = _gave_up(trail, former.delivery, now.delivery), evidence.logs[trail.log]
    due_ms, since = lease.due_ms, former.end
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


def _is_lost(evidence: Evidence, former: _Moment, now: _Moment) -> bool:
    """Whether the same process delivers the same message again, because its own clock says that the lease is over.

    A RENEW of unknown outcome may have made the lease longer in the log.
    """
    processes = {evidence.process_of.get(moment.delivery.holder) for moment in (former, now)}
    if now.trail is not former.trail or len(processes) > 1:
        return False
    more = now.delivery.attempt - former.delivery.attempt
    return more > 0 or (more == 0 and not _is_started(now.trail, former.delivery, now.delivery))


def _is_stale(evidence: Evidence, moment: _Moment) -> bool:
    """Whether a consumer delivered a message without a lease, because of a clock."""
    delivery, trail, end = moment
    log, lease = evidence.logs.get(trail.log), moment.lease
    if log is None or (lease is not None and log.clock.latest(end, end, delivery.time_ms) < lease.due_ms):
        return False
    return _is_clock_wrong(evidence, trail, delivery)


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
            evidence.report.find("misplaced", trails[0], f"its ordering key is in {', '.join(sorted(used))}")


# --- redeliveries -----------------------------------------------------------------------------------------------------


def _judge_copies(evidence: Evidence, trail: Trail) -> None:
    """Judge that a message is redelivered in its place unless its record is no longer in the source."""
    for fact in trail.facts:
        early = (trail.began and trail.deliver_at_ms is not None) or trail.redriven or is_synthetic(trail.place)
        delayed = fact.kind == DELIVERED and early
        if fact.kind in (REDELIVERED, DELIVERED) and not is_resumed(evidence, trail, fact) and not delayed:
            evidence.report.find("no-copy", trail, f"{fact.kind} at {fact.offset}")
    root = evidence.trails.get((trail.queue, trail.id))
    if root is None or root is trail or trail.redriven or is_synthetic(root.place):
        return
    if trail.line != root.line:
        evidence.report.find("fidelity", trail, f"its line is {trail.line}, of {root} {root.line}", root)


def _judge_attempts(evidence: Evidence, trail: Trail) -> None:
    """Judge that each delivery in place is another attempt, unless a release that does not count came before."""
    deliveries, find = _deliveries(evidence, trail), evidence.report.find
    for former, delivery in pairwise(deliveries):
        known = delivery._replace(log_end=_known_to(evidence, trail, former, delivery))
        again = _released(trail, former, known)
        # A release of a message that a former holder has acknowledged meanwhile changes nothing in the log.
        counted = _is_started(trail, former, known) if again is None else again.counted
        if delivery.attempt < former.attempt + counted and not _is_clock_wrong(evidence, trail, delivery):
            find("attempts", trail, f"attempt {delivery.attempt} in event {delivery.number}, after {former.attempt}")
    for fact in trail.facts:
        # A consumer that asked before a late rejection may deliver the message after it.
        ended_at = max((offset for offset, _ in trail.changes if offset < fact.offset), default=-1)
        # Where the log ended by its time may be too late, and would excuse the delivery.
        earlier = [one for one in trail.deliveries if one.log_end is None or one.log_end <= ended_at]
        most = max((one.attempt for one in earlier if not _is_uncounted(trail, one)), default=0)
        # That of a lost message, whose attempt a release may have taken back, is judged with the decision.
        chosen = fact.kind == "DEAD_LETTERED" and fact.cause not in LOST_VALUES
        if chosen and fact.attempt < most and fact.before is not None:
            find("attempts", trail, f"a dead letter of attempt {fact.attempt}, although {most} was delivered")
    limits = evidence.may_be(trail.queue, "max_attempts")
    last = max((limit for limit in limits if limit is not None), default=inf)
    for delivery in deliveries:
        if not trail.attempt <= delivery.attempt <= max(last, trail.attempt):
            find("attempts", trail, f"attempt {delivery.attempt} in event {delivery.number}, limits {limits}")


def _known_to(evidence: Evidence, trail: Trail, former: HandlerDelivery, delivery: HandlerDelivery) -> int | None:
    """Return up to where the log says what a consumer knew of a former delivery when it acquired the message.

    If the lease of another holder had ended at the consumer's last question, it knows nothing of what that holder
    writes between the question and the ACQUIRE.
    """
    acquired = [at for at, _, holder in trail.acquired if holder == delivery.holder and at < delivery.until]
    asked = [(at, question) for at, question in trail.resumed if acquired and at < acquired[-1]]
    if former.holder == delivery.holder or not asked:
        return delivery.log_end
    answered, question = asked[-1]
    standing, clock = trail.at(question), evidence.logs[trail.log].clock
    ended = standing is not None and clock.latest(question, answered + 1, -1) >= standing.due_ms
    return question if ended else delivery.log_end


def _released(trail: Trail, former: HandlerDelivery, delivery: HandlerDelivery) -> Standing | None:
    """Return a delivered message's standing after its holder released it and before its next delivery."""
    for before, standing in pairwise(trail.standings(delivery.until)):
        if standing.state == WAITING_IN_ORDER and former.has(before):
            return standing
    return None


def _is_started(trail: Trail, former: HandlerDelivery, delivery: HandlerDelivery) -> bool:
    """Whether the log says that user code had a delivered message when its lease ended, before its next delivery."""
    if _gave_up(trail, former, delivery):
        return False
    seen = trail.standings(delivery.until)
    held = [standing for standing in seen if standing.state in _LEASED and former.has(standing)]
    # A consumer acquires a message again under its old holder, and with the same attempt if that did not count.
    former_lease = [standing for standing in held if standing.since_ms < held[-1].since_ms] or held
    return bool(former_lease) and former_lease[-1].counted


def _is_uncounted(trail: Trail, delivery: HandlerDelivery) -> bool:
    """Whether the log says that the attempt of a delivery never counted."""
    counted = [standing.counted for standing in trail.standings() if delivery.has(standing)]
    return bool(counted) and not any(counted)


def _gave_up(trail: Trail, former: HandlerDelivery, until: HandlerDelivery) -> bool:
    """Whether the holder of a delivery asked to release or reject the message, before another delivery."""
    return any(former.number < at < until.number for at in trail.requested("release", "reject", holder=former.holder))


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
    since = max(trail.requested("acquire", holder=former.holder), default=former.number)
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
        gone = standing.state in IN_ORDER and evidence.is_removed(trail)
        return gone or bool(evidence.logs[trail.log].halted)
    # Never read, because its reader has to ask the tracker first; other queues of the source wait, too.
    log = evidence.logs.get(evidence.log_of.get(trail.source, ""))
    return bool(evidence.ordered) and log is not None and bool(log.halted)
