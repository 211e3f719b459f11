"""One checker of a history: it reads each event once and needs no search, because the log orders what matters.

==================  ==================================================================================================
property            meaning of a violation
==================  ==================================================================================================
``lost``            an accepted message is neither acknowledged, dead, cancelled, counted as removed by retention, nor
                    delayed past the end of the history
``silent``          retention removed a message before it was read, and no consumer reported that it skipped it
``from-nowhere``    a delivery, marker, redelivery or dead letter does not result from a send or request
``not-durable``     a client was told that its outcome is durable, but the log does not contain it
``after-ack``       a redelivery was decided after the message's ack had been read back
``early``           a redelivery was decided before the message was due by the log's clock at the tracker's own TICK,
                    or a record was delivered that its sender delays
``renewed``         a redelivery ignored a renewed lease
``moved``           a redelivery ignored that the message had been rescheduled
``not-open``        a redelivery concerned a message that no consumer had acquired
``fired-twice``     a redelivery was decided although its fact was in the log already
``before-own-tick`` a redelivery was decided before the tracker had read a TICK that it wrote after fencing its
                    predecessor
``wrong-cause``     a fact names a different cause from the one in the log
``attempts``        an attempt does not follow from the previous one, or exceeds the limit
``dead-letter``     a message is dead before its last attempt, or not dead after it, or dead as too large but is not
``cancelled``       a cancelled message was redelivered, or CANCELLED answers no request
``purged``          a message was delivered that a purge had ended before any consumer acquired it
``answered``        a caller was told that its RESCHEDULE or CANCEL was in time or too late, but the log disagrees
``redriven``        a redrive concerned a record that is not a dead letter, lacks its note or has too many,
                    or was reported but did not happen
``dispatched``      a message of an at-most-once queue was delivered twice, or before its DISPATCH was durable; or
                    ABANDONED concerns one that was not dispatched
``dead-twice``      a message has more dead letters than its redrives and copies of aborted transactions explain
``rejected``        a reject did not end in exactly one dead letter
``transaction``     a redelivery without its fact, or a fact without its redelivery
``fidelity``        key, value, headers, id or first sending differ from the original
``misplaced``       a redelivery went to another queue, or records of one ordering key are in several partitions
``misordered``      records of one ordering key are in a different order from their sender's calls
``delivered-twice`` one record was delivered twice, although its group neither lost its offsets nor changed
``unexplained``     a lease ran out, or a message was delivered again, but the history shows no cause
``lease-not-noticed``  an ack was reported as in time although the tracker had redelivered the message before
``position-lost``   a tracker continued although records that it needed were gone
``quarantine``      an unreadable marker is not in quarantine, or a readable one is
``not-drained``     a message is open at the end, or was never read
``expired``         a message was redelivered although it had expired by the log's clock, or delivered long after its
                    expiry; or it ended as expired before
``order``           a message was delivered before the end of an earlier one of its ordering key, or although its
                    consumer had resumed after the message's own end
``duplicate``       a message was delivered although its deduplication id had been accepted before, or two trackers
                    decided about one id
``exclusion``       a message was delivered while one of its ordering key was in flight
``no-copy``         a message of a queue with ordering was redelivered at the end of its source, not in its place
==================  ==================================================================================================

"No delayed message before its time" is ``early`` and ``moved``. "Delivered once" is the same for all messages:
``transaction``, ``fired-twice`` and, for deliveries, ``unexplained``.
"""

from __future__ import annotations

from collections.abc import Iterable

from lab.proof.causes import deliveries_asked_for, why_delivered_again, why_done_and_dead, why_read_again
from lab.proof.decisions import judge_tracker
from lab.proof.evidence import ACK, BITS, CLOCKS, REJECT, RELEASE, Evidence, Trail, gather
from lab.proof.findings import Report
from lab.proof.fold import COPIED, DEAD_LETTERED, DELAYED, DELIVERED, Key
from lab.proof.history import LEFT_OUT, Event
from lab.proof.key_order import is_stranded, judge_lines, redelivered_in_place
from lab.proof.messages import judge_answers, judge_copies, judge_duplicate, judge_ids, judge_sends
from marq.wire.markers import ANY_QUEUE
from marq.wire.names import is_synthetic


def check(events: Iterable[Event]) -> Report:
    return judge(gather(events))


def judge(evidence: Evidence) -> Report:
    """Judge a history, at most once: all records, then all messages, then the logs."""
    report = evidence.report
    report.events = evidence.number
    for trail in evidence.trails.values():
        _judge_record(evidence, trail)
    judge_sends(evidence)
    for message, trails in messages_of(evidence).items():
        _judge_message(evidence, message, trails)
        _judge_end(evidence, message, trails)
    for place in evidence.redriven:
        trails = [trail for trail in evidence.places.get(place, ()) if trail.redriven]
        if {fact.kind for trail in trails for fact in trail.facts} != {DELIVERED}:
            report.find("redriven", place, "was reported as redriven, and was not", *trails)
    judge_quarantine(evidence)
    judge_lines(evidence)
    judge_ids(evidence)
    return report


def _is_spent(evidence: Evidence, queue: str) -> bool:
    return "at-most-once" in evidence.may_be(queue, "delivery")


# --- records ----------------------------------------------------------------------------------------------------------


def _judge_record(evidence: Evidence, trail: Trail) -> None:
    report = evidence.report
    if not trail.id and trail.place in evidence.letters:
        return  # a dead letter that was deleted
    if trail.queue == ANY_QUEUE and any(record.id for record in evidence.places[trail.place]):
        _judge_outcomes(evidence, trail)
        judge_answers(report, trail, evidence.places[trail.place])
        return
    if not trail.id:
        report.find("from-nowhere", trail, "the record is missing")
        return
    _judge_contents(evidence, trail)
    if trail.duplicate:
        judge_duplicate(report, trail)
        return
    if len(trail.deliveries) > 1 and trail.queue not in evidence.ordered:
        if (why := why_read_again(evidence, trail)) is None:
            report.find("delivered-twice", trail, f"delivered {len(trail.deliveries)} times")
        else:
            trail.why_delivered_twice = why
    _judge_outcomes(evidence, trail)
    judge_tracker(evidence, trail)
    judge_answers(report, trail, [trail])
    for delivery in trail.deliveries[:1]:
        if trail.deliver_at_ms is not None and trail.began:
            report.find("early", trail, f"delivered, although due at {trail.deliver_at_ms}")
        if evidence.is_purged_unread(trail):
            report.find("purged", trail, "delivered, although it was purged")
        if _is_spent(evidence, trail.queue) and (trail.spent_at is None or trail.spent_at > delivery.number):
            report.find("dispatched", trail, f"delivered by event {delivery.number}, dispatched by {trail.spent_at}")
    _judge_delay(evidence, trail)
    if trail.redriven:
        _judge_redriven(evidence, trail)
    report.delayed += any(standing.state == DELAYED for standing in trail.standings())


def _judge_delay(evidence: Evidence, trail: Trail) -> None:
    """Judge the delay that the queue's settings give a record; the sender's takes precedence."""
    delays_ms = evidence.may_be(trail.queue, "delay_ms", 0)
    if not trail.began or is_synthetic(trail.place) or trail.deliver_at_ms is not None or 0 in delays_ms:
        return
    if any(what == LEFT_OUT for _, what in trail.contents):
        return
    first = next(iter(trail.standings()), None)
    dues_ms = {trail.time_ms + delay_ms for delay_ms in delays_ms}
    if trail.deliveries or (first is not None and (first.state != DELAYED or first.due_ms not in dues_ms)):
        evidence.report.find("early", trail, f"its queue delays it until {dues_ms}, it stood {first}")


def _judge_redriven(evidence: Evidence, trail: Trail) -> None:
    report = evidence.report
    letter = evidence.letters.get(trail.place)
    report.redriven += any(fact.kind == DELIVERED for fact in trail.facts)
    if letter is None:
        report.find("redriven", trail, "the dead letter is missing")
    elif (letter["id"], letter["content"]) != (trail.id, trail.content):
        report.find("fidelity", trail, f"{letter['id']} {letter['content']} came back as {trail.id} {trail.content}")
    settled = evidence.settled[trail.place]
    # After a transaction with an unknown outcome, an owner writes the note again.
    if len({*settled}) != 1 or len(settled) > max(1, evidence.owners[trail.log]):
        report.find("redriven", trail, f"its notes are {settled}")


def _judge_contents(evidence: Evidence, trail: Trail) -> None:
    for number, what in trail.contents:
        if what == LEFT_OUT and not any(fact.kind in COPIED for fact in trail.facts):
            # A dead letter that names its record. Whether the record is too large is judged with the fact.
            continue
        attempt = what.startswith("attempt")
        expected = f"attempt {trail.attempt}" if attempt else trail.content
        if what != expected:
            name = "attempts" if attempt else "fidelity"
            evidence.report.find(name, trail, f"{what} in event {number}, the record: {expected}")


def _judge_outcomes(evidence: Evidence, trail: Trail) -> None:
    """Compare requests of clients, confirmations to them, and the log."""
    report = evidence.report
    expected = evidence.told | ACK | RELEASE | REJECT
    if unsaid := trail.written & ~trail.said & expected:
        report.find("from-nowhere", trail, f"{_names(unsaid)} without a request")
    if trail.said & ACK and not trail.deliveries:
        report.find("from-nowhere", trail, "an ack without a delivery")
    if missing := trail.confirmed & ~trail.written:
        report.find("not-durable", trail, f"{_names(missing)} not in the log")


# --- messages ---------------------------------------------------------------------------------------------------------


def _judge_message(evidence: Evidence, message: Key, trails: list[Trail]) -> None:
    report = evidence.report
    acked = any(trail.acked_at is not None for trail in trails)
    dead = any(fact.kind == DEAD_LETTERED for trail in trails for fact in trail.facts[:1])
    report.acked += acked
    report.dead += dead
    report.acked_and_dead += acked and dead
    root = evidence.trails.get(message)
    if root is None or not root.began:
        report.find("from-nowhere", trails[0], f"its id is {message[1]}, not a message", *trails)
        return
    judge_copies(report, root, trails)
    _judge_duplicates(evidence, root, trails)
    _judge_dead(evidence, root, trails)


def _judge_duplicates(evidence: Evidence, root: Trail, trails: list[Trail]) -> None:
    report = evidence.report
    delivered = sum(len(trail.deliveries) for trail in trails)
    in_place = [redelivered_in_place(evidence, trail) for trail in trails]
    surplus = delivered - 1 - deliveries_asked_for(trails) - sum(asked for asked, _ in in_place)
    if surplus <= 0:
        return
    report.duplicates += surplus
    # A lease may have ended by a log's clock but not by its holder's, before its DISPATCH.
    logs = {trail.log for trail in trails for fact in trail.facts if fact.cause == "EXPIRED"}
    if _is_spent(evidence, trails[0].queue) and not evidence.befell(*logs) & CLOCKS:
        report.find("dispatched", root, f"delivered {delivered} times", *trails)
    causes = why_delivered_again(trails)
    causes += [why for _, whys in in_place for why in whys]
    if len(causes) < surplus:
        text = f"delivered {delivered} times, {len(causes)} of {surplus} duplicates have a cause"
        report.find("unexplained", root, text, *trails)
    report.causes.update(int(why) for why in causes[:surplus])


def _judge_dead(evidence: Evidence, root: Trail, trails: list[Trail]) -> None:
    """Allow one dead letter, and one more for each redrive and each acquired copy of an aborted transaction."""
    report = evidence.report
    letters = sum(len(trail.deaths) for trail in trails)
    redriven = sum(trail.redriven for trail in trails)
    aborted = sum(bool(trail.acquired) and not trail.committed for trail in trails)
    report.dead_twice += max(0, letters - 1 - redriven)
    if letters > 1 + redriven + aborted:
        text = f"{letters} dead letters, {redriven} redrives, {aborted} aborted copies"
        report.find("dead-twice", root, text, *trails)
    if letters and not redriven and any(trail.said & ACK for trail in trails):
        why = why_done_and_dead(trails)
        report.done_and_dead[0 if why is None else int(why)] += 1


def _judge_end(evidence: Evidence, message: Key, trails: list[Trail]) -> None:
    """Judge that each record of a message has ended, and the message at least once."""
    report = evidence.report
    done = any(trail.ended for trail in trails)
    for trail in trails:
        # The dead letter was settled before the redrive.
        if trail.ended or trail.duplicate or (trail.redriven and not trail.changes):
            continue
        log = evidence.logs[trail.log] if trail.log else None
        standing = log.open.get(trail.key) if log is not None else None
        if is_stranded(evidence, trail, standing):
            report.stranded += 1
        elif log is not None and standing is not None:
            if standing.state != DELAYED or standing.due_ms <= log.now_ms:
                report.find("not-drained", trail, f"open at the end, {standing}")
                continue
            # It is delayed past the end of the history.
            report.waiting += 1
        elif evidence.is_purged_unread(trail):
            report.purged += trail.committed
        elif not trail.committed:
            continue
        elif not evidence.is_removed(trail):
            report.find("not-drained", trail, "never read")
            continue
        else:
            report.expired_unread += not done
            if not any(start <= trail.offset < end for start, end in evidence.skipped[trail.source]):
                report.find("silent", trail, "removed before it was read, and no consumer reports it")
        done = True
    if not done and any(trail.committed and not trail.duplicate for trail in trails):
        report.lost += 1
        report.find("lost", f"{message[1]} of {message[0]}", "neither acknowledged nor dead", *trails)


def _names(bits: int) -> str:
    return ", ".join(name for name, bit in BITS.items() if bits & bit)


def messages_of(evidence: Evidence) -> dict[Key, list[Trail]]:
    """Return all messages: the record that began each, its redeliveries, and its redriven dead letters."""
    trails = [trail for trail in evidence.trails.values() if trail.id]
    #: The queues of dead letters that were redriven, by the queue that they were sent to and the message's id.
    origins = {
        (trail.queue, trail.id): evidence.letters[trail.place]["queue"]
        for trail in trails
        if trail.redriven and trail.place in evidence.letters
    }
    messages: dict[Key, list[Trail]] = {}
    for trail in trails:
        # It is a message of its own queue, or else of the queue that it comes from.
        began = [first.queue for first in evidence.places.get(trail.id, ()) if first.began]
        wanted = (trail.queue, origins.get((trail.queue, trail.id), ""))
        queue = next((queue for queue in wanted if queue in began), (began or [trail.queue])[0])
        messages.setdefault((queue, trail.id), []).append(trail)
    return messages


def judge_quarantine(evidence: Evidence) -> None:
    """Judge that all unreadable markers, and no others, are in quarantine."""
    find = evidence.report.find
    for log in list(evidence.logs.values()):
        for offset, content in log.unreadable.items():
            origin = f"{log.name}/{offset}"
            kept = evidence.quarantined.get(origin, [])
            if not kept and not log.halted:
                find("quarantine", origin, "not in quarantine")
            elif set(kept) - {content}:
                find("quarantine", origin, "another content in quarantine")
            elif len(kept) > max(1, evidence.owners[log.name]):
                # A new owner does not know of a transaction with an unknown outcome.
                find("quarantine", origin, f"{len(kept)} times in quarantine")
    for origin in evidence.quarantined:
        name, _, number = origin.rpartition("/")
        if int(number) not in evidence.log(name).unreadable:
            find("quarantine", origin, "in quarantine, but readable")
