"""The hard cases, one by one: worlds in which little else goes wrong, so that each is met often.

Each test runs some seeds with the faults that lead to its case, and checks that the case was met, and that every world
drained without a finding. mutants.py has the defects that these cases must reveal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from lab.proof.history import Event
from tests.simulation import swarm
from tests.simulation.mutant import HARD_CASES
from tests.simulation.world import Plan, World, inspect

SEEDS = 25
pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


def worlds(seeds: int = SEEDS, delayed: int | None = None, **faults: float) -> Iterator[World]:
    """Yield worlds with these faults and no others, and check that each of them ended well."""
    for seed in range(seeds):
        result, _, world = inspect(seed, Plan(faults=swarm.only(**faults), delayed=delayed))
        assert result.failed == "", f"seed {seed}"
        yield world


def summed(**faults: float) -> Counter[str]:
    stats: Counter[str] = Counter()
    for world in worlds(**faults):
        stats.update(world.stats)
    return stats


def markers(world: World, kind: str) -> list[Event]:
    return [event for event in world.history.events if event["op"] == "marker" and event["kind"] == kind]


def test_identity_a_copy_is_a_new_record_so_offsets_are_never_used_twice() -> None:
    """The late markers of a former holder concern the former record, and never its redeliveries."""
    late = copies = 0
    for world in worlds(2 * SEEDS, forgotten=0.4):
        records = [event for event in world.history.events if event["op"] == "record"]
        copies += sum("id" in event for event in records)
        ended = {name for fact in markers(world, "REDELIVERED") for name in names(fact)}
        late += sum(name in ended for ack in markers(world, "ACK") for name in names(ack))
        assert len({(event["process"], event["offset"], event["queue"]) for event in records}) == len(records)

    assert copies > 50
    assert late > 20


def names(marker: Event) -> list[str]:
    return [f"{marker['source']}/{offset}" for offset in marker["offsets"]]


def test_reopening_a_finished_record_that_is_read_again_stays_finished() -> None:
    """Its ACQUIRE is ignored, so nothing is redelivered although the consumer that has it never acknowledges it."""
    read_again = 0
    for world in worlds(commit_unknown=0.5, offsets_lost_every_ms=800.0, forgotten=0.1):
        for log in world.markers:
            finished: set[str] = set()
            for event in world.history.events:
                if event["process"] == log.name and event["op"] == "marker" and "offsets" in event:
                    if event["kind"] == "ACQUIRE":
                        read_again += len(finished.intersection(names(event)))
                    elif event["kind"] in ("ACK", "REDELIVERED", "DEAD_LETTERED"):
                        finished.update(names(event))

    assert read_again > 50


def test_coalescing_what_is_acquired_and_ended_between_two_writes_leaves_no_row() -> None:
    """Also when a row exists from before: the changelog is the plain fold, whenever its rows are written."""
    stats = summed(late_read=0.5, tracker_crash=0.02, table_lost=1.0, marker_slow=0.1)

    assert stats["restores"] > 100
    assert stats["tracker_crashes"] > 20


def test_lease_lost_a_holder_knows_no_later_than_the_tracker_that_its_lease_is_over() -> None:
    """Judged by its own monotonic clock from before the ACQUIRE; the settings, and its wall clock, may change."""
    lost = 0
    for world in worlds(marker_slow=0.3, forgotten=0.3, settings_every_ms=300.0, wall_step_every_ms=100.0):
        lost += sum(len(event.get("lost", ())) for event in world.history.events if event["op"] == "ack")

    assert lost > 50


def test_firing_what_is_on_its_way_is_not_sent_twice_and_what_failed_is_sent_again() -> None:
    fired: Counter[str] = Counter()
    for world in worlds(2 * SEEDS, flush_aborted=0.2, flush_unknown=0.2, slow_commit=0.5, forgotten=0.4):
        fired.update(event["type"] for event in world.history.events if event["op"] == "fire")

    # Each invoke is one decision: more of them than facts, because transactions failed.
    assert fired["unknown"] > 20
    assert fired["invoke"] > fired["ok"] + fired["unknown"] > 100


def test_sizes_a_copy_that_the_broker_refuses_becomes_a_dead_letter() -> None:
    """By the size of the payload, or because the broker refuses what marq's headers make too large."""
    refused = too_large = 0
    for world in worlds(4 * SEEDS, large=0.8, forgotten=0.4):
        refused += world.stats["copies_refused"]
        too_large += sum(fact["causes"].count("TOO_LARGE") for fact in markers(world, "DEAD_LETTERED"))

    assert refused > 5
    assert too_large > refused


def test_unknown_version_the_partition_stops_until_somebody_knows_it_and_garbage_is_put_aside() -> None:
    stopped = quarantined = 0
    for world in worlds(newer_marker=0.05, garbage_every_ms=300.0):
        stopped += world.stats["unknown_versions"]
        quarantined += sum(event["op"] == "quarantine" for event in world.history.events)

    assert stopped > 10
    assert quarantined > 50


def test_retention_a_tracker_whose_position_is_gone_stops_and_never_resets_silently() -> None:
    halted = harmless = 0
    for world in worlds(markers_gone_every_ms=200.0, markers_needed=0.3, starved=0.01, consumer_crash=0.01):
        halted += world.stats["position_lost"]
        harmless += any(log.start for log in world.markers) and not world.halted
        alarms = [event for event in world.history.events if event["op"] == "halt"]
        assert {event["log"] for event in alarms} == {world.markers[number].name for number in world.halted}

    assert halted > 3
    assert harmless > 3


def test_retention_unread_messages_that_are_gone_are_counted_and_said() -> None:
    gone = 0
    for world in worlds(unread_gone_every_ms=150.0, consumer_pause=0.03):
        gone += world.stats["expired_unread"]
        assert world.stats["lost"] == 0

    assert gone > 5


def test_old_local_state_a_table_that_may_have_missed_deletions_is_rebuilt() -> None:
    """The changelog was compacted, or deleted and recreated, while another host owned the partition."""
    stats = summed(
        changelog_compacted_every_ms=100.0,
        changelog_lost_every_ms=900.0,
        tracker_rebalance_every_ms=500.0,
        forgotten=0.3,
    )

    assert stats["old_tables"] > 20
    assert stats["changelogs_made_anew"] > 20
    assert stats["compacted"] > 500


def test_settings_are_read_before_anything_fires_and_followed_as_they_change() -> None:
    """Each decision rests on the version that its tracker has heard of, never on defaults."""
    versions: set[int] = set()
    for world in worlds(settings_every_ms=300.0, late_settings=0.5, forgotten=0.4, tracker_crash=0.01):
        known: dict[str, int] = {}
        for event in world.history.events:
            if event["op"] == "settings" and "queues" not in event:
                known[event["process"]] = event["version"]
            elif event["op"] == "fire":
                versions.add(known[event["process"]])

    assert min(versions) == 1
    assert max(versions) > 5


def test_readers_consumers_read_copies_of_aborted_transactions_and_trackers_do_not() -> None:
    """Such a copy is delivered: an explained duplicate, which ends like any other record."""
    causes: Counter[int] = Counter()
    for seed in range(2 * SEEDS):
        result, _, _ = inspect(seed, Plan(faults=swarm.only(flush_aborted=0.3, tracker_crash=0.01, forgotten=0.4)))
        assert result.failed == "", f"seed {seed}"
        causes.update(result.causes)

    assert causes[6] > 5


def test_groups_queues_join_leave_and_move_and_members_hear_of_it_late() -> None:
    """Positions of each queue travel in the offsets' metadata: nothing is missed."""
    stats = summed(move_every_ms=300.0, late_settings=0.5, late_news=0.3, rebalance_every_ms=700.0)

    assert stats["served_anew"] > 100
    assert stats["handed_out"] > 10 * SEEDS


def test_holder_who_comes_back_after_its_lease_and_session_changes_nothing_any_more() -> None:
    """Consumers and trackers that were paused, or suspended with their clocks, while others went on."""
    stats = summed(consumer_pause=0.03, tracker_pause=0.02, suspended=0.5, tracker_rebalance_every_ms=700.0)

    for what in ("consumer_pauses", "tracker_pauses", "suspensions", "fenced", "rebalances"):
        assert stats[what] > SEEDS, what


def on_their_way(world: World, question: str) -> Counter[str]:
    """Count, by kind, the facts of messages that a tracker was sending when a client asked this."""
    fired: dict[str, list[int]] = {}
    for event in world.history.events:
        if (event["op"], event["type"]) == ("fire", "invoke") and event["kind"] != "CANCELLED":
            fired.setdefault(f"{event['source']}/{event['offset']}", []).append(event["applied"])
    asked: dict[str, list[int]] = {}
    for event in markers(world, question):
        for name in names(event):
            asked.setdefault(name, []).append(event["offset"])
    found: Counter[str] = Counter()
    for kind in ("DELIVERED", "CANCELLED"):
        for fact in markers(world, kind):
            for name in names(fact):
                decided = fired.get(name, [])
                found[kind] += any(min(decided, default=at) < at < fact["offset"] for at in asked.get(name, ()))
    return found


@pytest.fixture(scope="module")
def asked() -> tuple[dict[str, Counter[str]], Counter[str]]:
    """The facts of messages that a tracker was sending when a client asked, by question; and all statistics."""
    found: dict[str, Counter[str]] = {"CANCEL": Counter(), "RESCHEDULE": Counter()}
    stats: Counter[str] = Counter()
    for world in worlds(2 * SEEDS, delayed=20, slow_commit=0.6, flush_aborted=0.1, flush_unknown=0.2, late_read=0.3):
        for question, counts in found.items():
            counts.update(on_their_way(world, question))
        stats += world.stats
    return found, stats


def test_cancel_what_is_on_its_way_leaves_or_is_cancelled_and_its_asker_knows_which(
    asked: tuple[dict[str, Counter[str]], Counter[str]],
) -> None:
    """A copy and a CANCEL: the one that is in the log first, and the transaction's end, decide."""
    found, stats = asked

    assert found["CANCEL"]["DELIVERED"] > 3
    assert found["CANCEL"]["CANCELLED"] > 3
    assert stats["cancelled"] > 100


def test_reschedule_what_is_on_its_way_is_moved_only_if_it_does_not_leave(
    asked: tuple[dict[str, Counter[str]], Counter[str]],
) -> None:
    found, stats = asked

    assert found["RESCHEDULE"]["DELIVERED"] > 8
    assert stats["moved"] > 100
    assert stats["asked_too_late"] > 100


def test_answer_is_asked_for_again_when_a_tracker_dies_between_reading_and_answering() -> None:
    """A client that keeps asking gets an answer, and no answer is wrong."""
    stats: Counter[str] = Counter()
    answered_again = 0
    for world in worlds(
        delayed=30, tracker_crash=0.03, flush_unknown=0.3, tracker_rebalance_every_ms=300.0, late_read=0.4
    ):
        stats += world.stats
        answers = Counter(event["holder"] for event in markers(world, "ANSWERED"))
        answered_again += sum(count > 1 for count in answers.values())

    assert stats["tracker_crashes"] > 50
    assert stats["asked_again"] > 100
    assert stats["questions_given_up"] == 0
    assert answered_again > 20


def test_delay_rows_outlive_restarts_lost_changelogs_and_clocks_that_jump() -> None:
    restored = 0
    stats: Counter[str] = Counter()
    for world in worlds(
        delayed=30,
        tracker_crash=0.01,
        table_lost=0.5,
        changelog_lost_every_ms=900.0,
        changelog_compacted_every_ms=200.0,
        clock_jump_every_ms=1_500.0,
        suspended=0.3,
        tracker_pause=0.01,
    ):
        stats += world.stats
        # An owner other than the one at the time of the DELAY has delivered it.
        owners = {event["holder"]: event["process"] for event in world.history.events if event["op"] == "own"}
        delayed_at = {name: event["offset"] for event in markers(world, "DELAY") for name in names(event)}
        fenced = {event["holder"]: event["fenced_at"] for event in world.history.events if event["op"] == "own"}
        for fact in markers(world, "DELIVERED"):
            assert fact["holder"] in owners
            restored += sum(delayed_at.get(name, 0) < fenced[fact["holder"]] for name in names(fact))

    assert restored > 100
    assert stats["changelogs_made_anew"] > 20
    assert stats["clock_jump"] > 20
    assert stats["delivered"] > 300


def test_delay_that_is_written_twice_counts_once() -> None:
    """This holds for senders that state `from_offset`; users of other senders send again, which makes two messages."""
    stats: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for world in worlds(delayed=30, send_failed=0.2, send_unknown=0.5, marker_slow=0.5):
        stats += world.stats
        written.update(name for event in markers(world, "DELAY") for name in names(event))

    assert stats["delays_repeated"] > 100
    assert sum(count > 1 for count in written.values()) > 100


def test_delay_by_a_header_holds_for_whoever_reads_the_record_and_when_it_is_read_again() -> None:
    stats: Counter[str] = Counter()
    delayed = 0
    for world in worlds(8 * SEEDS, commit_unknown=0.4, consumer_crash=0.01, rebalance_every_ms=500.0, marker_slow=0.2):
        stats += world.stats
        delayed += sum(max(event["dues_ms"] or [-1]) >= 0 for event in markers(world, "ACQUIRE"))

    assert delayed > stats["delayed_by_header"] > 100


def test_deduplication_ids_outlive_restarts_lost_tables_and_clocks_that_jump() -> None:
    stats: Counter[str] = Counter()
    sent = 0
    for world in worlds(
        2 * SEEDS,
        delayed=40,
        send_failed=0.2,
        send_unknown=0.3,
        marker_slow=0.3,
        tracker_crash=0.02,
        table_lost=0.5,
        changelog_lost_every_ms=1_500.0,
        clock_jump_every_ms=1_500.0,
    ):
        stats += world.stats
        sent += sum(bool(own_id) for event in markers(world, "DELAY") for own_id in event.get("deduplication_ids", []))

    assert stats["tracker_crashes"] > 50
    assert sent > stats["deduplicated"] > 200


def test_at_most_once_a_message_is_delivered_once_or_abandoned() -> None:
    """Consumers die before and after each DISPATCH, and write it too late."""
    stats: Counter[str] = Counter()
    dispatched = 0
    for world in worlds(4 * SEEDS, consumer_crash=0.02, marker_slow=0.3, commit_failed=0.2, rebalance_every_ms=700.0):
        stats += world.stats
        dispatched += len(markers(world, "DISPATCH"))

    assert dispatched > 100
    assert stats["abandoned"] > 5


def test_ordering_a_message_waits_for_the_end_of_the_one_before_whoever_reads_them() -> None:
    """Consumers die, pause past their sessions and lose their partitions with messages in flight and behind them."""
    resumed = again = 0
    for world in worlds(
        4 * SEEDS, consumer_crash=0.01, consumer_pause=0.01, commit_unknown=0.2, rebalance_every_ms=700.0
    ):
        resumed += sum(any(answer["states"]) for answer in markers(world, "RESUMED"))
        # An attempt that no handler has begun does not count, so most of these are attempt 1 again.
        acquired = Counter(
            (event["queue"], name)
            for event in markers(world, "ACQUIRE")
            if event.get("in_order")
            for name in names(event)
        )
        again += sum(count > 1 for count in acquired.values())

    assert resumed > 50
    assert again > 50


def test_subscriptions_each_queue_of_a_topic_ends_each_record_on_its_own() -> None:
    """A record is acknowledged for one queue while the other one's is redelivered, dead, or not even read."""
    ended: dict[tuple[int, str], set[tuple[str, str]]] = {}
    for number, world in enumerate(worlds(4 * SEEDS, forgotten=0.3, consumer_crash=0.01, move_every_ms=700.0)):
        for kind in ("ACK", "REDELIVERED", "DEAD_LETTERED"):
            for event in markers(world, kind):
                for name in names(event):
                    ended.setdefault((number, name), set()).add((event["queue"], kind))

    shared = [ends for ends in ended.values() if len({queue for queue, _ in ends}) > 1]
    assert len(shared) > 100
    assert sum(len({kind for _, kind in ends}) > 1 for ends in shared) > 20


def test_purge_a_message_that_was_not_acquired_before_it_is_never_delivered() -> None:
    """Consumers may be acquiring messages when they learn of it, and the purge may be killed and repeated."""
    stats: Counter[str] = Counter()
    for seed in range(2 * SEEDS):
        faults = swarm.only(acquire_slow=0.3, acquire_unknown=0.1, late_settings=0.3, commit_failed=0.1)
        result, _, world = inspect(seed, Plan(faults=faults, purges=1.0))
        assert result.failed == "", f"seed {seed}"
        stats.update(world.stats)

    assert stats["purges"] > SEEDS
    assert stats["purged"] > SEEDS
    assert stats["handed_out"] > 5 * SEEDS


def test_purge_a_lease_that_ends_while_its_acquire_is_late_is_not_acquired_again_without_a_question() -> None:
    """The ACQUIRE of a message of an ordered queue came after the PURGE, and its lease had ended by then."""
    result, _, _ = inspect(428, Plan(purges=1.0))

    assert result.failed == ""


def test_expiry_a_message_that_has_expired_is_not_delivered_and_ends_with_a_fact() -> None:
    """Before its first delivery, while it is delayed, in a consumer's buffer, or between two attempts."""
    ended: Counter[str] = Counter()
    for seed in range(2 * SEEDS):
        result, _, world = inspect(seed, Plan(expires=0.6))
        assert result.failed == "", f"seed {seed}"
        for kind in ("CANCELLED", "DEAD_LETTERED"):
            ended[kind] += sum(event["causes"].count("MESSAGE_EXPIRED") for event in markers(world, kind))
        ended["handed_out"] += world.stats["handed_out"]

    assert min(ended.values()) > SEEDS


def test_expiry_a_message_that_is_read_again_after_its_setting_was_changed_may_be_delivered_twice() -> None:
    """A consumer left it with the tracker, which delivered it by the new setting; the offset was not committed."""
    result, _, _ = inspect(100_500, Plan(expires=0.6))

    assert (result.failed, result.duplicates, dict(result.causes)) == ("", 1, {5: 1})


def test_limits_hold_in_all_consumers_through_crashes_and_rebalances() -> None:
    """Each world is judged at each delivery; queues come to their limits, and priorities and fairness are in use."""
    reached, settings = 0, Counter[str]()
    for seed in range(4 * SEEDS):
        plan = Plan(faults=swarm.only(rebalance_every_ms=400.0, consumer_crash=0.01, late_read=0.5))
        result, _, world = inspect(seed, plan)
        assert result.failed == "", f"seed {seed}"
        reached += world.stats["at_limit"]
        for queue in world.ordering.queues:
            its = world.definitions.versions[-1].settings(queue)
            settings.update(fair=its.fair, priority=its.priority is not None, limited=its.limited)

    assert reached > SEEDS
    assert min(settings.values()) > 5


def test_priorities_each_turn_is_due_to_its_queue_by_what_else_waits() -> None:
    """Each turn is judged (prioritising.py); higher, lower and equal queues wait together, some for a second."""
    stats: Counter[str] = Counter()
    for seed in range(2 * SEEDS):
        plan = Plan(faults=swarm.only(late_read=0.1), messages=100, priorities=((9, 1), (5, 5), (9, 5, 1))[seed % 3])
        result, _, world = inspect(seed, plan)
        assert result.failed == "", f"seed {seed}"
        stats.update(world.stats)

    turns = ("turns_of_higher", "turns_of_lower", "turns_of_equal", "overdue_turns")
    assert min(stats[name] for name in turns) > 10


def test_each_hard_case_has_a_test_here() -> None:
    tests = [name for name in globals() if name.startswith("test_")]
    cases = [case.replace("LeaseLost", "lease_lost").replace(" ", "_") for case in HARD_CASES]

    assert [case for case in cases if not any(name.startswith(f"test_{case}_") for name in tests)] == []


def test_killers_a_message_that_ends_its_process_uses_up_its_own_attempts_only() -> None:
    """An oracle looks for messages next to it that are dead because of it."""
    stats = summed(killer=1.0)

    assert stats["killed"] > SEEDS
    assert stats["redelivered"] > stats["killed"]
