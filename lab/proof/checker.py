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

from lab.proof.causes import (
    Why,
    deliveries_asked_for,
    why_delivered_again,
    why_done_and_dead,
    why_expired,
    why_read_again,
)
from lab.proof.decisions import (
    HEADER_ROOM_BYTES,
    LOST_VALUES,
    MESSAGE_EXPIRED,
    decided_on,
    judge_decision,
    judge_expiry_of_deliveries,
    judge_fact,
)
from lab.proof.evidence import ACK, BITS, CLOCKS, REJECT, RELEASE, Evidence, TrackerFact, Trail, events_of, gather
from lab.proof.findings import Report
from lab.proof.fold import ABANDONED, CANCELLED, COPIED, DEAD_LETTERED, DELAYED, DELIVERED, Key
from lab.proof.history import LEFT_OUT, Event
from lab.proof.key_order import is_resumed, is_stranded, judge_lines, redelivered_in_place
from lab.proof.messages import judge_answers, judge_copies, judge_duplicate, judge_ids, judge_sends
from marq.wire.markers import ANY_QUEUE
from marq.wire.names import is_synthetic


def check(events: Iterable[Event]) -> Report:
    return judge(gather(events))


def judge(evidence: Evidence) -> Report:
    """Judge a history, at most once."""
    return _Verdict(evidence).give()


class _Verdict:
    """Judges all records, then all messages, then the logs."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._report = evidence.report
        self._find = evidence.report.find
        #: The records of each message.
        self._messages = messages_of(evidence)
        self._message_of = {trail.key: message for message, trails in self._messages.items() for trail in trails}
        #: Why leases ended, and why records were delivered more than once.
        self._expiries: dict[Key, Why] = {}
        self._read_again: dict[Key, Why] = {}
        #: Messages that ended, or that cannot have ended yet.
        self._done: set[Key] = set()

    def give(self) -> Report:
        report, evidence = self._report, self._evidence
        report.events = evidence.number
        for trail in evidence.trails.values():
            self._judge_record(trail)
        judge_sends(evidence)
        for message, trails in self._messages.items():
            self._judge_message(message, trails)
        self._judge_ends()
        for place in evidence.redriven:
            trails = [trail for trail in evidence.places.get(place, ()) if trail.redriven]
            if {fact.kind for trail in trails for fact in trail.facts} != {DELIVERED}:
                self._find("redriven", f"{place}: was reported as redriven, and was not", events_of(trails))
        judge_quarantine(evidence)
        judge_lines(evidence)
        judge_ids(evidence)
        return report

    def _is_spent(self, queue: str) -> bool:
        return "at-most-once" in self._evidence.may_be(queue, "delivery")

    # --- records ------------------------------------------------------------------------------------------------------

    def _judge_record(self, trail: Trail) -> None:
        evidence, report = self._evidence, self._report
        if not trail.id and trail.place in evidence.letters:
            return  # a dead letter that was deleted
        if trail.queue == ANY_QUEUE and any(record.id for record in evidence.places[trail.place]):
            self._judge_outcomes(trail)
            judge_answers(report, trail, evidence.places[trail.place])
            return
        if not trail.id:
            self._find("from-nowhere", f"{trail}: the record is missing", trail.events)
            return
        self._judge_contents(trail)
        if trail.duplicate:
            judge_duplicate(report, trail)
            return
        if len(trail.deliveries) > 1 and trail.queue not in evidence.ordered:
            if (why := why_read_again(evidence, trail)) is None:
                self._find("delivered-twice", f"{trail}", trail.events)
            else:
                self._read_again[trail.key] = why
        self._judge_outcomes(trail)
        for decision in trail.decisions:
            judge_decision(evidence, trail, decision)
        for fact in trail.facts[:1]:
            self._judge_fact(trail, fact)
        for fact in trail.facts[1:]:
            first = trail.facts[0]
            self._find("fired-twice", f"{trail}: facts at {first.offset} and {fact.offset}", trail.events)
        self._judge_deaths(trail)
        judge_expiry_of_deliveries(evidence, trail)
        judge_answers(report, trail, [trail])
        for delivery in trail.deliveries[:1]:
            if trail.deliver_at_ms is not None and trail.began:
                self._find("early", f"{trail}: delivered, although due at {trail.deliver_at_ms}", trail.events)
            if evidence.is_purged_unread(trail):
                self._find("purged", f"{trail}: delivered, although it was purged", trail.events)
            if self._is_spent(trail.queue) and (trail.spent_at is None or trail.spent_at > delivery.number):
                text = f"{trail}: delivered by event {delivery.number}, dispatched by {trail.spent_at}"
                self._find("dispatched", text, trail.events)
        self._judge_delay(trail)
        if trail.redriven:
            self._judge_redriven(trail)
        report.delayed += any(standing is not None and standing.state == DELAYED for _, standing in trail.changes)

    def _judge_delay(self, trail: Trail) -> None:
        """Judge the delay that the queue's settings give a record; the sender's takes precedence."""
        delays_ms = self._evidence.may_be(trail.queue, "delay_ms", 0)
        if not trail.began or is_synthetic(trail.place) or trail.deliver_at_ms is not None or 0 in delays_ms:
            return
        if any(what == LEFT_OUT for _, what in trail.contents):
            return
        first = next((standing for _, standing in trail.changes), None)
        dues_ms = {trail.time_ms + delay_ms for delay_ms in delays_ms}
        if trail.deliveries or (first is not None and (first.state != DELAYED or first.due_ms not in dues_ms)):
            self._find("early", f"{trail}: its queue delays it until {dues_ms}, it stood {first}", trail.events)

    def _judge_redriven(self, trail: Trail) -> None:
        letter = self._evidence.letters.get(trail.place)
        self._report.redriven += any(fact.kind == DELIVERED for fact in trail.facts)
        if letter is None:
            self._find("redriven", f"{trail}: the dead letter is missing", trail.events)
        elif (letter["id"], letter["content"]) != (trail.id, trail.content):
            text = f"{trail}: {letter['id']} {letter['content']} came back as {trail.id} {trail.content}"
            self._find("fidelity", text, trail.events)
        settled = self._evidence.settled[trail.place]
        # After a transaction with an unknown outcome, an owner writes the note again.
        if len({*settled}) != 1 or len(settled) > max(1, self._evidence.owners[trail.log]):
            self._find("redriven", f"{trail}: its notes are {settled}", trail.events)

    def _judge_contents(self, trail: Trail) -> None:
        for number, what in trail.contents:
            if what == LEFT_OUT and not any(fact.kind in COPIED for fact in trail.facts):
                # A dead letter that names its record. Whether the record is too large is judged with the fact.
                continue
            attempt = what.startswith("attempt")
            expected = f"attempt {trail.attempt}" if attempt else trail.content
            if what != expected:
                text = f"{trail}: {what} in event {number}, the record: {expected}"
                self._find("attempts" if attempt else "fidelity", text, trail.events)

    def _judge_outcomes(self, trail: Trail) -> None:
        """Compare requests of clients, confirmations to them, and the log."""
        expected = self._evidence.told | ACK | RELEASE | REJECT
        if unsaid := trail.written & ~trail.said & expected:
            self._find("from-nowhere", f"{trail}: {_names(unsaid)} without a request", trail.events)
        if trail.said & ACK and not trail.deliveries:
            self._find("from-nowhere", f"{trail}: an ack without a delivery", trail.events)
        if missing := trail.confirmed & ~trail.written:
            self._find("not-durable", f"{trail}: {_names(missing)} not in the log", trail.events)

    def _judge_fact(self, trail: Trail, fact: TrackerFact) -> None:
        evidence, report = self._evidence, self._report
        expired = fact.cause == MESSAGE_EXPIRED
        report.redelivered += trail.redelivery is not None
        report.message_expired += expired
        report.cancelled += fact.kind == CANCELLED and not expired
        report.abandoned += fact.kind == ABANDONED
        judge_fact(evidence, trail, fact)
        limit = evidence.limit
        if fact.cause == "TOO_LARGE" and limit is not None and trail.size + HEADER_ROOM_BYTES < limit:
            self._find("dead-letter", f"{trail}: {trail.size} bytes are not too large", trail.events)
        if fact.cause == "GONE" and trail.offset >= evidence.starts.get(trail.source, 0):
            self._find("dead-letter", f"{trail}: its record was not removed", trail.events)
        asked = {"RELEASED": RELEASE, "REJECTED": REJECT}.get(fact.cause)
        if asked is not None and not trail.said & asked and not is_resumed(evidence, trail, fact):
            self._find("unexplained", f"{trail}: {fact.cause} without a request", trail.events)
        if fact.cause == "EXPIRED":
            self._judge_expiry(trail, fact)
        elif fact.kind == DELIVERED and trail.deliveries and len(evidence.may_be(trail.queue, "expires_after_ms")) > 1:
            # A consumer left the message with its tracker, and one that read it again delivered it: its offset was not
            # committed, and the setting was changed between the two reads.
            self._expiries[trail.key] = Why.NOT_COMMITTED

    def _judge_expiry(self, trail: Trail, fact: TrackerFact) -> None:
        """Judge why a lease ended, and whether its holder noticed that, no later than the tracker."""
        evidence = self._evidence
        decided = decided_on(trail, fact, evidence.logs[fact.log])
        holder, until = (decided[0].holder, decided[1]) if decided is not None else ("", fact.offset)
        trail.read_again = any(offset >= until for offset, _, _ in trail.acquired)
        why = why_expired(evidence, trail, fact, holder)
        if why is None:
            self._find("unexplained", f"{trail}: its lease ended without a cause", trail.events)
        else:
            self._expiries[trail.key] = why
            self._report.expiries[int(why)] += 1
        late = trail.acked_at is not None and trail.acked_at > fact.offset
        # If it was read again after the decision, its consumer does not learn that its ACQUIRE has no effect.
        clocks = evidence.befell(fact.log, evidence.process_of.get(holder, "")) & CLOCKS
        if late and not trail.read_again and holder in trail.settled_by and not clocks:
            text = f"{trail}: the copy stands at {fact.offset}, the ack at {trail.acked_at}"
            self._find("lease-not-noticed", text, trail.events)

    def _judge_deaths(self, trail: Trail) -> None:
        dead = [fact for fact in trail.facts[:1] if fact.kind == DEAD_LETTERED]
        wanted = self._evidence.may_be(trail.queue, "dead_letter", default=True)
        if any(fact.cause in (*LOST_VALUES, MESSAGE_EXPIRED) for fact in dead):
            # No handler gave it up, so it is always kept; an expired message that is dropped is CANCELLED.
            wanted = {True}
        name = "rejected" if any(fact.cause == "REJECTED" for fact in dead) else "transaction"
        if len(trail.deaths) > len(dead) or (len(trail.deaths) < len(dead) and False not in wanted):
            self._find(name, f"{trail}: {len(dead)} facts, {len(trail.deaths)} dead letters", trail.events)
        if trail.deaths and wanted == {False}:
            self._find(name, f"{trail}: {trail.queue} keeps no dead letters", trail.events)
        for event in trail.deaths:
            # It has the number of attempts used.
            others = [
                fact.attempt
                for fact in dead
                if trail.queue in self._evidence.ordered or fact.cause in (*LOST_VALUES, MESSAGE_EXPIRED)
            ]
            attempts = [trail.attempt, *others]
            if event["id"] != trail.id or event["attempt"] != attempts[-1]:
                self._find("fidelity", f"{trail}: dead letter {event['id']} {event['attempt']}", trail.events)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _judge_message(self, message: Key, trails: list[Trail]) -> None:
        report = self._report
        acked = any(trail.acked_at is not None for trail in trails)
        dead = any(fact.kind == DEAD_LETTERED for trail in trails for fact in trail.facts[:1])
        report.acked += acked
        report.dead += dead
        report.acked_and_dead += acked and dead
        if any(trail.ended for trail in trails):
            self._done.add(message)
        root = self._evidence.trails.get(message)
        if root is None or not root.began:
            self._find("from-nowhere", f"{trails[0]}: its id is {message[1]}, not a message", events_of(trails))
            return
        judge_copies(report, root, trails)
        self._judge_duplicates(root, trails)
        self._judge_dead(root, trails)

    def _judge_duplicates(self, root: Trail, trails: list[Trail]) -> None:
        evidence, events = self._evidence, events_of(trails)
        delivered = sum(len(trail.deliveries) for trail in trails)
        in_place = [redelivered_in_place(evidence, trail) for trail in trails]
        surplus = delivered - 1 - deliveries_asked_for(trails) - sum(asked for asked, _ in in_place)
        if surplus <= 0:
            return
        self._report.duplicates += surplus
        # A lease may have ended by a log's clock but not by its holder's, before its DISPATCH.
        logs = {trail.log for trail in trails for fact in trail.facts if fact.cause == "EXPIRED"}
        if self._is_spent(trails[0].queue) and not evidence.befell(*logs) & CLOCKS:
            self._find("dispatched", f"{root}: delivered {delivered} times", events)
        causes = why_delivered_again(trails, self._expiries, self._read_again)
        causes += [why for _, whys in in_place for why in whys]
        if len(causes) < surplus:
            text = f"{root}: delivered {delivered} times, {len(causes)} of {surplus} duplicates have a cause"
            self._find("unexplained", text, events)
        self._report.causes.update(int(why) for why in causes[:surplus])

    def _judge_dead(self, root: Trail, trails: list[Trail]) -> None:
        """Allow one dead letter, and one more for each redrive and each acquired copy of an aborted transaction."""
        letters = sum(len(trail.deaths) for trail in trails)
        redriven = sum(trail.redriven for trail in trails)
        aborted = sum(bool(trail.acquired) and not trail.committed for trail in trails)
        self._report.dead_twice += max(0, letters - 1 - redriven)
        if letters > 1 + redriven + aborted:
            text = f"{root}: {letters} dead letters, {redriven} redrives, {aborted} aborted copies"
            self._find("dead-twice", text, events_of(trails))
        if letters and not redriven and any(trail.said & ACK for trail in trails):
            why = why_done_and_dead(trails, self._expiries, self._read_again)
            self._report.done_and_dead[0 if why is None else int(why)] += 1

    # --- the end ------------------------------------------------------------------------------------------------------

    def _judge_ends(self) -> None:
        """Judge that each record has ended, and each message at least once."""
        evidence, report = self._evidence, self._report
        for trail in evidence.trails.values():
            # The dead letter was settled before the redrive.
            if not trail.id or trail.ended or trail.duplicate or (trail.redriven and not trail.changes):
                continue
            log = evidence.logs[trail.log] if trail.log else None
            standing, message = log.open.get(trail.key) if log is not None else None, self._message_of[trail.key]
            if is_stranded(evidence, trail, standing):
                report.stranded += 1
            elif log is not None and standing is not None:
                if standing.state != DELAYED or standing.due_ms <= log.now_ms:
                    self._find("not-drained", f"{trail}: open at the end, {standing}", trail.events)
                    continue
                # It is delayed past the end of the history.
                report.waiting += 1
            elif evidence.is_purged_unread(trail):
                report.purged += trail.committed
            elif not trail.committed:
                continue
            elif trail.offset >= evidence.starts.get(trail.source, 0):
                self._find("not-drained", f"{trail}: never read", trail.events)
                continue
            else:
                report.expired_unread += message not in self._done
                if not any(start <= trail.offset < end for start, end in evidence.skipped[trail.source]):
                    self._find(
                        "silent", f"{trail}: removed before it was read, and no consumer reports it", trail.events
                    )
            self._done.add(message)
        for message, trails in self._messages.items():
            if message not in self._done and any(trail.committed and not trail.duplicate for trail in trails):
                report.lost += 1
                text = f"{message[1]} of {message[0]} is neither acknowledged nor dead"
                self._find("lost", text, events_of(trails))


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
                find("quarantine", f"{origin} is not in quarantine")
            elif set(kept) - {content}:
                find("quarantine", f"{origin}: another content in quarantine")
            elif len(kept) > max(1, evidence.owners[log.name]):
                # A new owner does not know of a transaction with an unknown outcome.
                find("quarantine", f"{origin} is in quarantine {len(kept)} times")
    for origin in evidence.quarantined:
        name, _, number = origin.rpartition("/")
        if int(number) not in evidence.log(name).unreadable:
            find("quarantine", f"{origin} is in quarantine, but readable")
