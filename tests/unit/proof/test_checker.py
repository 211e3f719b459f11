"""Histories that break each property, each found by the property's own name; and clean ones, which pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marq.core.markers import Cause, Kind
from proof import checker
from proof.checker import check
from proof.history import Event, holder_name
from tests.unit.proof import test_delays, test_once
from tests.unit.proof.story import (
    FIRST,
    LEASE_MS,
    LOG,
    MARKERS,
    QUEUE,
    SECOND,
    SETTINGS,
    Story,
    clean,
    judged,
)

Events = list[Event]


def find(events: Events, op: str, type_: str = "ok", **fields: Any) -> Event:
    """Return the first event like that."""
    for event in events:
        if (event["op"], event["type"]) == (op, type_) and all(event.get(key) == each for key, each in fields.items()):
            return event
    raise AssertionError(f"no {op} {type_} {fields}")


def drop(events: Events, op: str, type_: str = "ok", **fields: Any) -> None:
    events.remove(find(events, op, type_, **fields))


def marker(events: Events, kind: str, offset: int) -> Event:
    return find(events, "marker", kind=kind, offsets=[offset])


def test_a_clean_history_passes_and_its_figures_are_right() -> None:
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
    """Nobody reads what is sent."""
    story = Story()
    story.send(20)
    events += story.history.events[4:]


def lose_a_record(events: Events) -> None:
    drop(events, "record", offset=0)


def pass_over_in_silence(events: Events) -> None:
    drop(events, "skipped")


def deliver_what_nobody_sent(events: Events) -> None:
    find(events, "deliver", record=f"{LOG}/0")["record"] = f"{LOG}/77"


def send_twice_what_was_sent_once(events: Events) -> None:
    record = find(events, "record", offset=0)
    events.append({**record, "offset": 8})


def acknowledge_without_a_client(events: Events) -> None:
    events[:] = [event for event in events if event["op"] != "ack" or event["offsets"] != [0]]


def confirm_what_is_not_in_the_log(events: Events) -> None:
    events.remove(marker(events, "ACK", 0))


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


def fire_what_nobody_has_acquired(events: Events) -> None:
    drop(events, "marker", kind="ACQUIRE", offsets=[1])


def fire_twice(events: Events) -> None:
    events.append({**marker(events, "REDELIVERED", 1), "offset": 50})
    copied = find(events, "record", offset=6)
    events.append({**copied, "offset": 9})


def fire_without_a_tick(events: Events) -> None:
    find(events, "fire", "invoke", offset=1)["tick"] = None


def fire_by_a_tick_from_before_the_fencing(events: Events) -> None:
    find(events, "own")["fenced_at"] = 100


def fire_for_another_cause(events: Events) -> None:
    for event in (find(events, "fire", "invoke", offset=2), marker(events, "REDELIVERED", 2)):
        event |= {"cause": "EXPIRED", "causes": ["EXPIRED"]}


def count_an_attempt_twice(events: Events) -> None:
    for event in (find(events, "fire", "invoke", offset=1), marker(events, "REDELIVERED", 1)):
        event |= {"attempt": 3, "attempts": [3]}


def die_before_the_last_attempt(events: Events) -> None:
    for event in (find(events, "fire", "invoke", offset=1), marker(events, "REDELIVERED", 1)):
        event |= {"kind": "DEAD_LETTERED", "attempt": 1, "attempts": [1]}


def go_on_after_the_last_attempt(events: Events) -> None:
    find(events, "settings", version=1)["queues"][QUEUE]["max_attempts"] = 1


def be_too_large_and_is_not(events: Events) -> None:
    for event in (find(events, "fire", "invoke", offset=3), marker(events, "DEAD_LETTERED", 3)):
        event |= {"cause": "TOO_LARGE", "causes": ["TOO_LARGE"]}


def reject_without_a_dead_letter(events: Events) -> None:
    drop(events, "dead")


def reject_with_two_dead_letters(events: Events) -> None:
    events.append({**find(events, "dead"), "offset": 1})


def bury_two_committed_copies(events: Events) -> None:
    story = Story()
    aborted_copy(story, dead=(1, 2), committed=True)
    events[:] = story.history.events


def send_a_copy_without_its_fact(events: Events) -> None:
    copied = find(events, "record", offset=6)
    events.append({**copied, "offset": 9})


def write_a_fact_without_its_copy(events: Events) -> None:
    find(events, "record", offset=6)["type"] = "fail"


def change_a_value(events: Events) -> None:
    find(events, "record", offset=6)["content"] = "-.something-else.-"


def change_what_is_handed_out(events: Events) -> None:
    find(events, "deliver", record=f"{LOG}/0")["content"] = "-.something-else.-"


def change_what_an_acquire_keeps(events: Events) -> None:
    marker(events, "ACQUIRE", 0)["contents"] = ["-.something-else.-"]


def change_when_it_was_first_sent(events: Events) -> None:
    find(events, "record", offset=6)["first_sent_ms"] += 1


def lose_the_error(events: Events) -> None:
    find(events, "record", offset=5)["error"] = "another"


def give_a_dead_letter_another_id(events: Events) -> None:
    find(events, "dead")["id"] = f"{LOG}/0"


def copy_to_another_queue(events: Events) -> None:
    find(events, "record", offset=6)["queue"] = "other"


def hand_a_record_out_twice(events: Events) -> None:
    events.append({**find(events, "deliver", record=f"{LOG}/0"), "process": "second"})


def expire_without_a_reason(events: Events) -> None:
    drop(events, "kill", "info")


def release_what_nobody_released(events: Events) -> None:
    events[:] = [event for event in events if event["op"] != "release"]
    marker(events, "RELEASE", 2)["holder"] = holder_name(FIRST)


def notice_no_lost_lease(events: Events) -> None:
    """Message 1 is acknowledged after its copy was sent, and its consumer was told that all is well."""
    story = Story()
    story.said("first", "ack", FIRST, [1], lost=[])
    events += [*story.history.events[4:], {**marker(events, "ACK", 0), "offsets": [1], "offset": 60}]


def read_on_where_markers_are_gone(events: Events) -> None:
    events.insert(0, {"process": MARKERS, "type": "ok", "op": "truncate", "offset": 3})


def forget_the_quarantine(events: Events) -> None:
    drop(events, "quarantine")


def put_a_marker_aside(events: Events) -> None:
    find(events, "quarantine")["origin"] = f"{MARKERS}/0"


def put_something_else_aside(events: Events) -> None:
    find(events, "quarantine")["content"] = "?"


def put_it_aside_twice(events: Events) -> None:
    events.append(find(events, "quarantine"))


def leave_a_copy_unread(events: Events) -> None:
    for kind in ("ACQUIRE", "ACK"):
        events.remove(marker(events, kind, 6))
    gone = [event for event in events if event.get("offsets") == [6] or event.get("record") == f"{LOG}/6"]
    events[:] = [event for event in events if event not in gone]


def leave_a_copy_open(events: Events) -> None:
    events.remove(marker(events, "ACK", 6))
    events[:] = [event for event in events if event["op"] != "ack" or event["offsets"] != [6]]


def say_what_nobody_knows(events: Events) -> None:
    find(events, "kill", "info")["op"] = "unheard-of"


def mix_a_log_up(events: Events) -> None:
    events.append(marker(events, "ACK", 0))


BROKEN: list[tuple[str, Callable[[Events], None]]] = [
    ("lost", lose_a_message),
    ("lost", lose_a_record),
    ("silent", pass_over_in_silence),
    ("from-nowhere", deliver_what_nobody_sent),
    ("from-nowhere", send_twice_what_was_sent_once),
    ("from-nowhere", acknowledge_without_a_client),
    ("not-durable", confirm_what_is_not_in_the_log),
    ("after-ack", decide_after_the_ack_was_read),
    ("early", decide_before_it_is_due),
    ("renewed", decide_although_it_was_renewed),
    ("not-open", fire_what_nobody_has_acquired),
    ("fired-twice", fire_twice),
    ("before-own-tick", fire_without_a_tick),
    ("before-own-tick", fire_by_a_tick_from_before_the_fencing),
    ("wrong-cause", fire_for_another_cause),
    ("attempts", count_an_attempt_twice),
    ("dead-letter", die_before_the_last_attempt),
    ("dead-letter", go_on_after_the_last_attempt),
    ("dead-letter", be_too_large_and_is_not),
    ("rejected", reject_without_a_dead_letter),
    ("rejected", reject_with_two_dead_letters),
    ("dead-twice", bury_two_committed_copies),
    ("transaction", send_a_copy_without_its_fact),
    ("transaction", write_a_fact_without_its_copy),
    ("fidelity", change_a_value),
    ("fidelity", change_what_is_handed_out),
    ("fidelity", change_what_an_acquire_keeps),
    ("fidelity", change_when_it_was_first_sent),
    ("fidelity", lose_the_error),
    ("fidelity", give_a_dead_letter_another_id),
    ("misplaced", copy_to_another_queue),
    ("delivered-twice", hand_a_record_out_twice),
    ("unexplained", expire_without_a_reason),
    ("unexplained", release_what_nobody_released),
    ("lease-not-noticed", notice_no_lost_lease),
    ("position-lost", read_on_where_markers_are_gone),
    ("quarantine", forget_the_quarantine),
    ("quarantine", put_a_marker_aside),
    ("quarantine", put_something_else_aside),
    ("quarantine", put_it_aside_twice),
    ("not-drained", leave_a_copy_unread),
    ("not-drained", leave_a_copy_open),
    ("malformed", say_what_nobody_knows),
    ("malformed", mix_a_log_up),
]


@pytest.mark.parametrize(("broken", "change"), BROKEN, ids=lambda each: getattr(each, "__name__", each))
def test_a_history_that_breaks_a_property_is_found_by_its_name(broken: str, change: Callable[[Events], None]) -> None:
    events = clean()
    change(events)

    report = check(events)

    assert broken in report.violations, [str(finding) for finding in report.findings]
    (found, *_) = [finding for finding in report.findings if finding.property == broken]
    assert all(0 <= number < len(events) for number in found.events)


def test_each_property_that_the_checker_names_has_a_history_that_breaks_it() -> None:
    table = checker.__doc__ or ""
    named = {line.split("``")[1] for line in table.splitlines() if line.startswith("``")}

    broken = {name for name, _ in (*BROKEN, *test_delays.BROKEN, *test_once.BROKEN)}
    assert named - broken == {"budget"}
    assert broken - named == {"malformed"}


def test_more_duplicates_than_allowed_are_a_violation() -> None:
    assert check(clean(), budget=1).violations == {}
    assert check(clean(), budget=0).violations == {"budget": 1}


# --- what is allowed --------------------------------------------------------------------------------------------------


def taken_and_expired(story: Story) -> None:
    """One message whose lease runs out, and its copy, which is acknowledged."""
    story.tick(LEASE_MS + 100)
    story.fire(0, Kind.REDELIVERED, 2, Cause.EXPIRED)
    story.copy(1, 0, 2)
    story.take("second", SECOND, 1, 0, 2)
    story.ack("second", SECOND, 1)


def hang(story: Story) -> None:
    story.send(0)
    story.take("first", FIRST, 0, 0)
    story.history.add("first", "ok", "hang", record=f"{LOG}/0")
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
    story.fire(0, Kind.REDELIVERED, 2, Cause.EXPIRED, decided=False)
    story.copy(1, 0, 2)
    story.take("second", SECOND, 1, 0, 2)
    story.ack("second", SECOND, 1)


def read_again_after_the_lease(story: Story) -> None:
    story.send(0)
    story.acquire("first", FIRST, 0, 0)
    names = {"holder": holder_name(FIRST), "source": LOG, "offsets": [0]}
    story.history.add("first", "unknown", "commit", **names)
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
    names = {"holder": holder_name(FIRST), "source": LOG, "offsets": [0]}
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


@pytest.mark.parametrize(("cause", "told"), ALLOWED, ids=lambda each: getattr(each, "__name__", each))
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
    assert (report.dead_twice, report.dead, report.done_and_dead) == (twice, len(dead), done)


def test_a_message_whose_consumer_was_killed_before_its_last_ack_was_durable_is_counted_as_done_and_dead() -> None:
    def told(story: Story) -> None:
        story.history.events[0]["queues"] = {QUEUE: {**SETTINGS, "max_attempts": 1}}
        story.send(0)
        story.take("first", FIRST, 0, 0)
        names = {"holder": story.name(FIRST), "source": LOG, "offsets": [0]}
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


def test_an_uncounted_release_keeps_the_attempt() -> None:
    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.release("first", FIRST, 0, "", counted=False)
        story.tick()
        story.fire(0, Kind.REDELIVERED, 1, Cause.RELEASED)
        story.copy(1, 0, 1)
        story.take("second", SECOND, 1, 0, 1)
        story.ack("second", SECOND, 1)

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


def test_without_the_trackers_own_events_the_log_alone_shows_what_is_wrong() -> None:
    """As above, but with no ``fire`` events: a real tracker need not write a history."""
    for broken, change in BROKEN:
        if broken in ("after-ack", "early", "renewed", "attempts", "wrong-cause", "dead-letter"):
            events = clean()
            change(events)

            report = check([event for event in events if event["op"] != "fire"])

            assert broken in report.violations, change.__name__


def test_a_release_that_comes_while_the_copy_is_on_its_way_changes_nothing() -> None:
    """The simulation's seed 110785: the tracker's next TICK stands behind the release and before the fact, too."""

    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.history.add("first", "ok", "hang", record=f"{LOG}/0")
        story.tick(LEASE_MS + 100)
        story.release("first", FIRST, 0, "", counted=False)
        story.tick()
        story.fire(0, Kind.REDELIVERED, 2, Cause.EXPIRED, decided=False)
        story.copy(1, 0, 2)
        story.take("second", SECOND, 1, 0, 2)
        story.ack("second", SECOND, 1)

    assert [str(finding) for finding in judged(told).findings] == []


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
        story.fire(0, Kind.REDELIVERED, 2, Cause.RELEASED)
        story.copy(1, 0, 2)
        story.take("second", SECOND, 1, 0, 2)
        story.ack("second", SECOND, 1)

    assert judged(lambda story: told(story, 1)).findings == []
    assert judged(lambda story: told(story, 2)).violations == {"dead-letter": 1}
