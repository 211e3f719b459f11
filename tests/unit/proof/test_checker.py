"""Histories that break each property, each found by the property's own name; and clean ones, which pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab.proof import checker
from lab.proof.checker import check
from lab.proof.history import Event, holder_name
from marq.wire.markers import Cause, Kind
from tests.unit.proof import test_deduplication, test_delays, test_expiry, test_key_order, test_once, test_purges
from tests.unit.proof.story import (
    FIRST,
    LEASE_MS,
    LOG,
    MARKERS,
    OTHER_CONTENT,
    QUEUE,
    SECOND,
    SETTINGS,
    Broken,
    Events,
    Story,
    change,
    clean,
    decide,
    events_of,
    find,
    judged,
    keep,
    marker,
    omit,
    repeat,
)

#: The delivery of the first record, its ACQUIRE, and what retention says.
ZEROTH, ACQUIRED = {"record": f"{LOG}/0"}, {"kind": "ACQUIRE", "offsets": [0]}
TRUNCATED = {"process": MARKERS, "type": "ok", "op": "truncate", "offset": 3}


def test_a_clean_history_passes_and_its_statistics_are_right() -> None:
    report = check(clean())

    assert [str(finding) for finding in report.findings] == []
    summary = report.summary()
    assert {name: summary[name] for name in ("sent", "accepted", "acked", "dead", "redelivered", "expired_unread")} == {
        "sent": 5, "accepted": 5, "acked": 3, "dead": 1, "redelivered": 2, "expired_unread": 1,
    }  # fmt: skip
    assert (summary["duplicates"], summary["causes"], summary["expiries"]) == (1, {"1": 1}, {"1": 1})
    assert summary["events"] == len(clean())


def test_the_order_of_different_logs_and_processes_does_not_matter() -> None:
    events = clean()
    logs = [event for event in events if event["op"] in ("record", "dead", "quarantine", "marker")]
    said = [event for event in events if event not in logs]

    assert check([*said, *logs]).summary() == check(events).summary() == check([*logs, *said]).summary()


# --- each property ----------------------------------------------------------------------------------------------------


def lose_a_message(events: Events) -> None:
    story = Story()
    story.send(20)
    events += story.history.events[4:]


def confirm_one_record_twice(events: Events) -> None:
    """A producer takes one message's confirmation for that of another message, which looks the same."""
    for event in [event for event in events if event["op"] == "send" and event["message"] == "0"]:
        events.append({**event, "message": "20"})


def last_tick(events: Events) -> Event:
    """The one by which message 1 is found due."""
    return [event for event in events if event.get("kind") == "TICK"][-1]


def insert_before(events: Events, tick: Event, marker: Event, before_ms: int) -> None:
    """Append a marker a little earlier; to a log it is the same whether offsets are whole."""
    place = {"offset": tick["offset"] - 0.5, "time_ms": tick["time_ms"] - before_ms}
    events.insert(events.index(tick), {**marker, **place})


def decide_after_the_ack_was_read(events: Events) -> None:
    story = Story()
    story.said("first", "ack", FIRST, [1])
    events += story.history.events[4:]
    insert_before(events, last_tick(events), {**marker(events, "ACK", 0), "offsets": [1]}, before_ms=1)


def decide_before_it_is_due(events: Events) -> None:
    for name in ("time_ms", "monotonic_ms"):
        last_tick(events)[name] -= 500


def decide_although_it_was_renewed(events: Events) -> None:
    story = Story()
    story.said("first", "renew", FIRST, [1])
    events += story.history.events[4:]
    renew = {**marker(events, "ACK", 0), "kind": "RENEW", "offsets": [1], "lease_ms": LEASE_MS}
    insert_before(events, last_tick(events), renew, before_ms=900)


def fire_twice(events: Events) -> None:
    events.append({**marker(events, "REDELIVERED", 1), "offset": 50})
    events.append({**find(events, "record", offset=6), "offset": 9})


def bury_two_committed_copies(events: Events) -> None:
    story = Story()
    aborted_copy(story, dead=(1, 2), committed=True)
    events[:] = story.history.events


def release_without_a_request(events: Events) -> None:
    events[:] = [event for event in events if event["op"] != "release"]
    marker(events, "RELEASE", 2)["holder"] = holder_name(FIRST)


def notice_no_lost_lease(events: Events) -> None:
    """Message 1 is acknowledged after its copy was sent, and its consumer was told that all is well."""
    story = Story()
    story.said("first", "ack", FIRST, [1], lost=[])
    events += [*story.history.events[4:], {**marker(events, "ACK", 0), "offsets": [1], "offset": 60}]


def leave_a_copy_unread(events: Events) -> None:
    for kind in ("ACQUIRE", "ACK"):
        events.remove(marker(events, kind, 6))
    gone = [event for event in events if event.get("offsets") == [6] or event.get("record") == f"{LOG}/6"]
    events[:] = [event for event in events if event not in gone]


def leave_a_copy_open(events: Events) -> None:
    events.remove(marker(events, "ACK", 6))
    events[:] = [event for event in events if event["op"] != "ack" or event["offsets"] != [6]]


BROKEN: list[Broken] = [
    ("lost", "a message is never read", lose_a_message),
    ("lost", "a record is lost", omit("record", offset=0)),
    ("lost", "two sends are told the same record", confirm_one_record_twice),
    ("silent", "unread messages are passed over in silence", omit("skipped")),
    ("from-nowhere", "a record is delivered that was never sent", change("deliver", ZEROTH, record=f"{LOG}/77")),
    ("from-nowhere", "a message is written twice", repeat("record", {"offset": 0}, offset=8)),
    ("from-nowhere", "no client acknowledged", keep(lambda event: event["op"] != "ack" or event["offsets"] != [0])),
    ("not-durable", "an ack is not in the log", omit("marker", kind="ACK", offsets=[0])),
    ("after-ack", "a tracker decides after it has read the ack", decide_after_the_ack_was_read),
    ("early", "a tracker decides too early", decide_before_it_is_due),
    ("renewed", "a tracker overlooks a renewal", decide_although_it_was_renewed),
    ("not-open", "a message is redelivered that was never acquired", omit("marker", kind="ACQUIRE", offsets=[1])),
    ("fired-twice", "a message is fired twice", fire_twice),
    ("before-own-tick", "a tracker has no TICK", change("fire", {"offset": 1}, "invoke", tick=None)),
    ("before-own-tick", "its TICK is from before the fencing", change("own", {}, fenced_at=100)),
    ("wrong-cause", "a release is taken for an expiry", decide(2, "REDELIVERED", cause="EXPIRED")),
    ("attempts", "an attempt is counted twice", decide(1, "REDELIVERED", attempt=3)),
    ("dead-letter", "attempts are left", decide(1, "REDELIVERED", kind="DEAD_LETTERED", attempt=1)),
    ("dead-letter", "no attempt is left", lambda events: events[0]["queues"][QUEUE].update(max_attempts=1)),
    ("dead-letter", "a message is not too large", decide(3, "DEAD_LETTERED", cause="TOO_LARGE")),
    ("rejected", "there is no dead letter", omit("dead")),
    ("rejected", "there are two dead letters", repeat("dead", {}, offset=1)),
    ("dead-twice", "both copies are committed", bury_two_committed_copies),
    ("transaction", "a copy has no fact", repeat("record", {"offset": 6}, offset=9)),
    ("transaction", "a fact has no copy", change("record", {"offset": 6}, type="fail")),
    ("fidelity", "a copy has another value", change("record", {"offset": 6}, content=OTHER_CONTENT)),
    ("fidelity", "another value is delivered", change("deliver", ZEROTH, content=OTHER_CONTENT)),
    ("fidelity", "an ACQUIRE keeps another value", change("marker", ACQUIRED, contents=[OTHER_CONTENT])),
    ("fidelity", "a copy was sent at another time", change("record", {"offset": 6}, first_sent_ms=5_002)),
    ("fidelity", "an error is lost", change("record", {"offset": 5}, error="another")),
    ("fidelity", "a dead letter has another id", change("dead", {}, id=f"{LOG}/0")),
    ("misplaced", "a copy goes to another queue", change("record", {"offset": 6}, queue="other")),
    ("delivered-twice", "a record is delivered twice", repeat("deliver", ZEROTH, process="second")),
    ("unexplained", "a lease expires without a reason", omit("kill", "info")),
    ("unexplained", "a message is released without a request", release_without_a_request),
    ("lease-not-noticed", "a consumer does not notice a lost lease", notice_no_lost_lease),
    ("position-lost", "markers are gone", lambda events: events.insert(0, TRUNCATED)),
    ("quarantine", "unreadable bytes are not quarantined", omit("quarantine")),
    ("quarantine", "a marker is quarantined", change("quarantine", {}, origin=f"{MARKERS}/0")),
    ("quarantine", "other bytes are quarantined", change("quarantine", {}, content="?")),
    ("quarantine", "the same bytes are quarantined twice", repeat("quarantine", {})),
    ("not-drained", "a copy is never read", leave_a_copy_unread),
    ("not-drained", "a copy stays open", leave_a_copy_open),
    ("malformed", "an operation is unknown", change("kill", {}, "info", op="unheard-of")),
    ("malformed", "a log has an offset twice", repeat("marker", {"kind": "ACK", "offsets": [0]})),
]
ALL_BROKEN = [
    *[(clean, case) for case in BROKEN],
    *[(test_delays.clean, case) for case in test_delays.BROKEN],
    *[(test_deduplication.clean, case) for case in test_deduplication.BROKEN],
    *[(test_once.redriven, case) for case in test_once.REDRIVEN_BROKEN],
    *[(test_once.spent, case) for case in test_once.SPENT_BROKEN],
    *[(test_purges.purged, case) for case in test_purges.BROKEN],
    *[(test_expiry.clean, case) for case in test_expiry.BROKEN],
]


@pytest.mark.parametrize(("told", "broken"), ALL_BROKEN, ids=[": ".join(broken[:2]) for _, broken in ALL_BROKEN])
def test_a_history_that_breaks_a_property_is_found_by_its_name(told: Callable[[], Events], broken: Broken) -> None:
    name, _, change = broken
    events = told()
    change(events)

    report = check(events)

    assert name in report.violations, [str(finding) for finding in report.findings]
    (found, *_) = [finding for finding in report.findings if finding.property == name]
    assert all(0 <= number < len(events) for number in found.events)


#: Of them, what a real tracker shows that need not write a history.
IN_THE_LOG = {"after-ack", "early", "renewed", "moved", "attempts", "wrong-cause", "dead-letter", "cancelled"}
IN_THE_LOGS = [
    (told, case) for told, case in ALL_BROKEN if case[0] in IN_THE_LOG and told in (clean, test_delays.clean)
]


@pytest.mark.parametrize(("told", "broken"), IN_THE_LOGS, ids=[": ".join(broken[:2]) for _, broken in IN_THE_LOGS])
def test_without_the_trackers_own_events_the_log_alone_shows_it(told: Callable[[], Events], broken: Broken) -> None:
    name, _, change = broken
    events = told()
    change(events)

    report = check([event for event in events if event["op"] != "fire"])

    assert name in report.violations


def test_each_property_that_the_checker_names_has_a_history_that_breaks_it() -> None:
    table = checker.__doc__ or ""
    named = {line.split("``")[1] for line in table.splitlines() if line.startswith("``")}

    broken = {name for _, (name, _, _) in ALL_BROKEN} | {name for name, _ in test_key_order.BROKEN}
    assert named - broken == set()
    assert broken - named == {"malformed"}


# --- what is allowed --------------------------------------------------------------------------------------------------


def taken_and_expired(story: Story) -> None:
    """One message whose lease runs out, and its copy, which is acknowledged."""
    story.tick(LEASE_MS + 100)
    story.redeliver(Cause.EXPIRED)


def hang(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.history.add("first", "ok", "hang", queue=QUEUE, record=f"{LOG}/0")
    taken_and_expired(story)


def ack_after_the_copy(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.history.add("nemesis", "invoke", "pause", target="first")
    taken_and_expired(story)
    story.history.add("nemesis", "ok", "pause", target="first")
    story.said("first", "ack", FIRST, [0], lost=[0])
    story.ack("first", FIRST, 0)
    find(story.history.events, "ack", offsets=[0])["lost"] = [0]
    story.history.events[-2]["lost"] = [0]


def ack_between_tick_and_fact(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.history.add("nemesis", "invoke", "pause", target="first")
    story.tick(LEASE_MS + 100)
    story.ack("first", FIRST, 0)
    story.redeliver(Cause.EXPIRED, decided=False)


def read_again_after_the_lease(story: Story) -> None:
    story.send(0)
    story.acquire("first", FIRST, 0, 0)
    names = {"holder": holder_name(FIRST), "queue": QUEUE, "source": LOG, "offsets": [0]}
    for type_ in ("invoke", "unknown"):
        story.history.add("first", type_, "commit", **names)
    story.tick(LEASE_MS + 100)
    story.fire(0, Kind.REDELIVERED, 2, Cause.EXPIRED)
    story.copy(1, 0, 2)
    story.take("second", SECOND, 0, 0)
    story.ack("second", SECOND, 0)
    story.take("second", SECOND, 1, 0, 2)
    story.ack("second", SECOND, 1)


def aborted_copy(story: Story, *, dead: tuple[int, ...] = (), committed: bool = False) -> None:
    """A transaction that was aborted has left a copy (1); of it and of the next one (2) these become dead letters."""
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.release("first", FIRST, 0, "")
    story.tick()
    story.copy(1, 0, 2, committed=committed)
    story.fire(0, Kind.REDELIVERED, 2, Cause.RELEASED)
    story.copy(2, 0, 2)
    for offset in (1, 2):
        story.take("second", SECOND, offset, 0, 2)
        if offset not in dead:
            story.ack("second", SECOND, offset)
            continue
        story.reject("second", SECOND, offset)
        story.tick()
        story.fire(offset, Kind.DEAD_LETTERED, 2, Cause.REJECTED)
        story.dead(0, 2, offset=offset)


def sent_again_by_its_user(story: Story) -> None:
    story.send(0)
    sent = [event for event in story.history.events if event["op"] == "send"]
    sent[1]["type"] = "unknown"
    del sent[1]["record"]
    story.history.events.append(sent[0])
    story.record(1, 0)
    story.history.add("producer", "ok", "send", message="0", record=f"{LOG}/1")
    for offset in (0, 1):
        story.take("first", FIRST, offset, 0)
        story.ack("first", FIRST, offset)


def offsets_lost(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.ack("first", FIRST, 0)
    story.history.add("nemesis", "info", "offsets", target=f"queue {QUEUE}")
    story.take("second", SECOND, 0, 0)


def moved(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    queues = {QUEUE: {**SETTINGS, "group": "g"}}
    story.history.add("marq.queues/0", "ok", "settings", version=2, queues=queues)
    story.take("second", SECOND, 0, 0)
    story.history.events[-1]["group"] = "marq.group.g"
    story.ack("first", FIRST, 0)


def clock_jump(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.history.add("nemesis", "info", "clock", target=MARKERS)
    taken_and_expired(story)


def late_acquire_of_another(story: Story) -> None:
    story.send(0)
    names = {"holder": holder_name(FIRST), "queue": QUEUE, "source": LOG, "offsets": [0]}
    story.history.add("first", "invoke", "acquire", **names)
    story.history.add("first", "unknown", "acquire", **names, took_ms=300)
    story.take("second", SECOND, 0, 0)
    late = {**marker(story.history.events, "ACQUIRE", 0), "holder": holder_name(FIRST), "offset": 1}
    story.history.events.append(late)
    story.offset = 2
    taken_and_expired(story)


ALLOWED: list[tuple[int, Callable[[Story], None]]] = [
    (2, hang),
    (3, ack_after_the_copy),
    (4, ack_between_tick_and_fact),
    (5, read_again_after_the_lease),
    (6, aborted_copy),
    (7, sent_again_by_its_user),
    (8, offsets_lost),
    (9, moved),
    (11, clock_jump),
    (13, late_acquire_of_another),
]


@pytest.mark.parametrize(("cause", "told"), ALLOWED, ids=lambda value: getattr(value, "__name__", value))
def test_a_duplicate_with_a_cause_is_counted_under_its_number(cause: int, told: Callable[[Story], None]) -> None:
    report = judged(told)

    assert [str(finding) for finding in report.findings] == []
    assert report.causes == {cause: 1}


@pytest.mark.parametrize(("dead", "twice", "done"), [((1, 2), 1, {}), ((1,), 0, {6: 1}), ((2,), 0, {6: 1})])
def test_ends_of_a_message_that_an_aborted_copy_adds_are_counted(
    dead: tuple[int, ...], twice: int, done: dict[int, int]
) -> None:
    report = judged(lambda story: aborted_copy(story, dead=dead))

    assert [str(finding) for finding in report.findings] == []
    assert (report.dead, report.dead_twice, report.done_and_dead) == (1, twice, done)


def test_a_message_whose_consumer_was_killed_before_its_last_ack_was_durable_is_counted_as_done_and_dead() -> None:
    def told(story: Story) -> None:
        story.history.events[0]["queues"] = {QUEUE: {**SETTINGS, "max_attempts": 1}}
        story.send(0)
        story.take("first", FIRST, 0, 0)
        names = {"holder": story.name(FIRST), "queue": QUEUE, "source": LOG, "offsets": [0]}
        story.history.add("first", "invoke", "ack", **names)
        story.kill("first")
        story.tick(LEASE_MS + 100)
        story.fire(0, Kind.DEAD_LETTERED, 1, Cause.EXPIRED)
        story.dead(0, 1)

    report = judged(told)

    assert [str(finding) for finding in report.findings] == []
    assert (report.duplicates, report.dead_twice, report.done_and_dead) == (0, 0, {1: 1})


def test_a_partition_that_stopped_with_an_alarm_strands_its_messages_and_says_how_many() -> None:
    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.history.add("tracker", "ok", "halt", log=MARKERS, reason="PositionLost")

    report = judged(told)

    assert (report.findings, report.stranded, report.lost) == ([], 1, 0)


@pytest.mark.parametrize(("attempts", "violations"), [(0, {}), (1, {"attempts": 2})])
def test_a_message_whose_record_was_removed_before_its_handler_started_had_no_attempts(
    attempts: int, violations: dict[str, int]
) -> None:
    def tell(story: Story) -> None:
        story.send(0)
        story.acquire("first", FIRST, 0, 0, counted=False)
        story.kill("first")
        story.tick(LEASE_MS)
        story.history.add(LOG, "ok", "truncate", offset=1)
        story.fire(0, Kind.DEAD_LETTERED, attempts, Cause.GONE)
        story.dead(0, attempts)

    assert judged(tell).violations == violations


def test_an_uncounted_release_keeps_the_attempt() -> None:
    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.release("first", FIRST, 0, "", counted=False)
        story.tick()
        story.redeliver(Cause.RELEASED, 1)

    report = judged(told)

    assert [str(finding) for finding in report.findings] == []
    assert report.duplicates == 0


def test_a_queue_that_keeps_no_dead_letters_has_facts_alone() -> None:
    def told(story: Story) -> None:
        story.history.events[0]["queues"] = {QUEUE: {**SETTINGS, "dead_letter": False}}
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.reject("first", FIRST, 0)
        story.tick()
        story.fire(0, Kind.DEAD_LETTERED, 1, Cause.REJECTED)

    assert judged(told).findings == []


def test_a_release_that_comes_while_the_copy_is_on_its_way_changes_nothing() -> None:
    """The simulation's seed 110785: the tracker's next TICK stands behind the release and before the fact, too."""

    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.history.add("first", "ok", "hang", queue=QUEUE, record=f"{LOG}/0")
        story.tick(LEASE_MS + 100)
        story.release("first", FIRST, 0, "", counted=False)
        story.tick()
        story.redeliver(Cause.EXPIRED, decided=False)

    assert [str(finding) for finding in judged(told).findings] == []


def test_overlapping_pauses_do_not_explain_a_lease_that_begins_later() -> None:
    def told(story: Story) -> None:
        for type_ in ("invoke", "invoke", "ok", "ok"):
            story.history.add("nemesis", type_, "pause", target="first")
        story.send(0)
        story.take("first", FIRST, 0, 0)
        taken_and_expired(story)

    assert "unexplained" in judged(told).violations


def starved_between_acquire_and_delivery(story: Story) -> None:
    story.send(0)
    story.acquire("first", FIRST, 0, 0)
    starve(story, "first")
    story.deliver("first", FIRST, 0, 0)
    taken_and_expired(story)


def starved_before_the_acquire(story: Story) -> None:
    story.send(0)
    starve(story, "first")
    story.take("first", FIRST, 0, 0)
    taken_and_expired(story)


def starve(story: Story, process: str) -> None:
    for type_ in ("invoke", "ok"):
        story.history.add(process, type_, "pause", target=process)


@pytest.mark.parametrize(
    ("told", "unexplained"), [(starved_between_acquire_and_delivery, 0), (starved_before_the_acquire, 1)]
)
def test_a_lease_whose_acquire_only_the_log_shows_is_explained_by_starvation_from_then_on(
    told: Callable[[Story], None], unexplained: int
) -> None:
    events = [event for event in events_of(told) if event["op"] not in ("acquire", "commit")]

    report = check(events)

    assert sum(str(finding).endswith("its lease ended without a cause") for finding in report.findings) == unexplained


@pytest.mark.parametrize(("late", "unexplained"), [(False, 0), (True, 1)])
def test_a_fault_explains_the_end_of_a_lease_until_the_decision_although_events_of_logs_come_last(
    late: bool, unexplained: int
) -> None:
    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        if not late:
            starve(story, "first")
        story.tick(LEASE_MS)
        story.redeliver(Cause.EXPIRED)
        if late:
            starve(story, "first")

    events = sorted(events_of(told), key=lambda event: event["op"] in ("marker", "record"))

    report = check(events)

    assert sum(str(finding).endswith("its lease ended without a cause") for finding in report.findings) == unexplained


def test_a_tracker_is_judged_by_the_settings_that_it_has_heard_of() -> None:
    """Version 2 allows 5 attempts; the tracker that makes a dead letter after 3 knows only version 1, which is fine."""

    def told(story: Story, version: int) -> None:
        queues = {QUEUE: {**SETTINGS, "max_attempts": 1}}
        story.history.add("marq.queues/0", "ok", "settings", version=2, queues=queues)
        story.history.add("tracker", "ok", "settings", version=version)
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.release("first", FIRST, 0, "")
        story.tick()
        story.redeliver(Cause.RELEASED)

    assert judged(lambda story: told(story, 1)).findings == []
    assert judged(lambda story: told(story, 2)).violations == {"dead-letter": 1}
