"""The account must find what is wrong: each history here is made by hand, and has one thing in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from demo.account import Account, DeadLetter, Evidence, Reason, draw_up, percentile, unfounded_copies
from demo.journal import Entry, What
from demo.plan import make_value
from demo.trails import Key, Trails
from marq.core.markers import Ack, Acquire, Batch, Cause, Fact, Kind, Payload, Release, Source, Tick

LEASE_MS = 5_000
#: Two consumers, and the tracker.
ALICE, BOB, TRACKER = 1, 2, 9


class Story:
    """A history of message 7 and others: what is in the log, and what is in the journals."""

    def __init__(self) -> None:
        self.trails = Trails()
        self.journals: dict[str, list[Entry]] = {"alice": [], "bob": []}
        self.letters: list[DeadLetter] = []
        self.now_ms = 1_000

    def log(self, batch: Batch, after_ms: int = 1) -> None:
        self.now_ms += after_ms
        self.trails.fold(0, batch, self.now_ms)

    def acquire(self, key: Key, number: int = 7, *, by: int = ALICE, attempt: int = 1) -> None:
        payload = Payload(0, attempt, b"q", (), make_value(number))
        self.log(Acquire("q", by, Source("t", key[0]), [key[1]], LEASE_MS, key[1], [payload]))

    def handle(self, who: str, key: Key, number: int = 7, attempt: int = 1, *, what: What = What.HANDLED) -> None:
        self.now_ms += 1
        self.journals[who].append(Entry(what, number, attempt, *key, self.now_ms))

    def ack(self, key: Key, *, by: int = ALICE, after_ms: int = 1) -> None:
        self.log(Ack("q", by, Source("t", key[0]), [key[1]]), after_ms)

    def fact(
        self, key: Key, cause: Cause, *, after_ms: int = 1, attempt: int = 2, kind: Kind = Kind.REDELIVERED
    ) -> None:
        self.log(Fact(kind, "q", TRACKER, Source("t", key[0]), [key[1]], [attempt], [cause]), after_ms)

    def finish(self, who: str, key: Key, number: int = 7, *, attempt: int = 1) -> None:
        """Take, handle and ack, as it should be."""
        holder = ALICE if who == "alice" else BOB
        self.acquire(key, number, by=holder, attempt=attempt)
        self.handle(who, key, number, attempt)
        self.ack(key, by=holder)
        self.handle(who, key, number, attempt, what=What.ACKED)

    def account(
        self, sent: Sequence[int] = (7,), *, killed: Sequence[str] = (), aborted: Sequence[Key] = ()
    ) -> Account:
        trails = self.trails.by_record
        return draw_up(Evidence(sent, self.journals, self.letters, trails, set(killed), set(aborted)))


def reasons(account: Account) -> list[Reason]:
    return [duplicate.reason for duplicate in account.duplicates]


def test_what_was_handled_and_acked_is_accounted_for() -> None:
    story = Story()
    story.finish("alice", (0, 5))

    account = story.account()

    assert (account.acked, account.lost, account.duplicates, account.right) == ({7}, [], [], True)
    assert account.acked_at == {1: 1}


def test_a_message_that_nobody_saw_is_lost() -> None:
    story = Story()
    story.finish("alice", (0, 5), 7)

    account = story.account(sent=[6, 7, 8])

    assert (account.lost, account.right) == ([6, 8], False)


def handled_without_ack(story: Story) -> None:
    story.acquire((0, 5))
    story.handle("alice", (0, 5))


def acked_and_not_handled(story: Story) -> None:
    story.acquire((0, 5))
    story.ack((0, 5))


def forgotten_and_never_redelivered(story: Story) -> None:
    story.acquire((0, 5))
    story.handle("alice", (0, 5), what=What.FORGOT)
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS)


@pytest.mark.parametrize("happens", [handled_without_ack, acked_and_not_handled, forgotten_and_never_redelivered])
def test_a_message_that_did_not_come_to_its_end_is_lost(happens: Callable[[Story], None]) -> None:
    story = Story()
    happens(story)

    assert story.account().lost == [7]


def test_an_ack_that_a_consumer_believed_durable_and_that_is_not_in_the_log_is_told() -> None:
    story = Story()
    story.acquire((0, 5))
    story.handle("alice", (0, 5))
    story.handle("alice", (0, 5), what=What.ACKED)

    account = story.account()

    assert account.false_acks == [("alice", (0, 5))]
    assert not account.right


def test_what_nobody_sent_comes_from_nowhere() -> None:
    story = Story()
    story.finish("alice", (0, 5), 7)
    story.finish("bob", (0, 6), 99)
    story.handle("bob", (0, 7), -1, what=What.STRANGE)
    story.letters.append(DeadLetter(None, 5, (0, 8), "rejected", 1))

    account = story.account()

    assert account.from_nowhere == [("bob", (0, 6)), ("bob", (0, 7)), ("dead letters", (0, 8))]
    assert account.acked == {7}
    assert not account.right


def test_a_dead_letter_is_an_end() -> None:
    story = Story()
    story.acquire((0, 5), attempt=5)
    story.log(Release("q", ALICE, Source("t", 0), [5], [0], True, ["no"]))
    story.fact((0, 5), Cause.RELEASED, attempt=5, kind=Kind.DEAD_LETTERED)
    story.letters.append(DeadLetter(7, 5, (0, 5), "5 of 5 attempts used", story.now_ms))

    account = story.account()

    assert (account.dead, account.lost, account.duplicates) == ({7}, [], [])
    assert account.dead_at == {5: 1}


def redelivered(story: Story, *, after_ms: int = LEASE_MS, late_ack: bool = False) -> None:
    """Alice handles a message; it is sent again, and Bob finishes it."""
    story.acquire((0, 5))
    story.handle("alice", (0, 5))
    story.fact((0, 5), Cause.EXPIRED, after_ms=after_ms)
    if late_ack:
        story.ack((0, 5))
    story.finish("bob", (0, 6), attempt=2)


def late_ack(story: Story) -> None:
    redelivered(story, late_ack=True)


def sent_again_before_the_lease_was_over(story: Story) -> None:
    redelivered(story, after_ms=10, late_ack=True)


def sent_again_although_acked(story: Story) -> None:
    story.finish("alice", (0, 5))
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS)
    story.finish("bob", (0, 6), attempt=2)


def sent_twice(story: Story) -> None:
    story.finish("alice", (0, 5))
    story.finish("bob", (0, 6))


def taken_over(story: Story) -> None:
    story.acquire((0, 5))
    story.handle("alice", (0, 5))
    story.finish("bob", (0, 5))


def read_again_after_its_copy(story: Story) -> None:
    story.acquire((0, 5))
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS)
    story.finish("bob", (0, 6), attempt=2)
    story.finish("bob", (0, 5))


@pytest.mark.parametrize(
    ("happens", "killed", "reason"),
    [
        (redelivered, ["alice"], Reason.CONSUMER_KILLED),
        (redelivered, [], Reason.UNEXPLAINED),
        (late_ack, [], Reason.LEASE_OVER),
        (sent_again_before_the_lease_was_over, [], Reason.UNEXPLAINED),
        (sent_again_although_acked, [], Reason.UNEXPLAINED),
        (sent_twice, [], Reason.UNEXPLAINED),
        (taken_over, ["alice"], Reason.TAKEN_OVER),
        (read_again_after_its_copy, ["alice"], Reason.TAKEN_TOO_LATE),
    ],
)
def test_a_duplicate_is_explained_by_what_happened_or_unexplained(
    happens: Callable[[Story], None], killed: list[str], reason: Reason
) -> None:
    story = Story()
    happens(story)

    account = story.account(killed=killed)

    # No message is lost either way: that a duplicate is unexplained is said beside it.
    assert (reasons(account), account.right) == ([reason], True)


def test_two_living_consumers_with_one_record_are_a_rebalance() -> None:
    story = Story()
    story.finish("alice", (0, 4), 4)
    story.acquire((0, 5), by=ALICE)
    story.handle("alice", (0, 5))
    story.finish("bob", (0, 5))

    account = story.account(sent=[4, 7])

    assert reasons(account) == [Reason.READ_AGAIN]


def test_a_copy_of_an_aborted_transaction_explains_a_duplicate_and_those_of_its_offspring() -> None:
    story = Story()
    story.acquire((0, 5))
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS)
    story.acquire((0, 6), attempt=2)
    story.fact((0, 6), Cause.EXPIRED, after_ms=LEASE_MS, attempt=3)
    story.finish("alice", (0, 7), attempt=2)
    story.finish("bob", (0, 8), attempt=3)

    account = story.account(aborted=[(0, 6)])

    assert unfounded_copies(story.trails) == {(0, 6), (0, 7)}
    assert reasons(account) == [Reason.ABORTED_COPY]
    assert reasons(story.account()) == [Reason.UNEXPLAINED]


def test_first_deliveries_and_copies_that_facts_tell_of_are_founded() -> None:
    story = Story()
    story.acquire((0, 5))
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS)
    story.finish("bob", (0, 6), attempt=2)

    found = unfounded_copies(story.trails)

    assert found == set()


def test_a_message_that_was_handled_and_became_a_dead_letter_is_a_duplicate() -> None:
    story = Story()
    story.acquire((0, 5), attempt=5)
    story.handle("alice", (0, 5), attempt=5)
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS, attempt=5, kind=Kind.DEAD_LETTERED)
    story.letters.append(DeadLetter(7, 5, (0, 5), "5 of 5 attempts used", story.now_ms))

    account = story.account(killed=["alice"])

    assert (account.dead, account.lost) == ({7}, [])
    assert reasons(account) == [Reason.CONSUMER_KILLED]


def test_lateness_counts_from_the_last_renewal_and_knows_what_a_tracker_inherited() -> None:
    story = Story()
    story.log(Tick(TRACKER, 0))
    story.acquire((0, 5))
    story.fact((0, 5), Cause.EXPIRED, after_ms=LEASE_MS + 120)
    story.acquire((0, 6), attempt=2)
    story.log(Tick(TRACKER + 1, 0), after_ms=LEASE_MS + 300)
    story.trails.fold(0, Fact(Kind.REDELIVERED, "q", TRACKER + 1, Source("t", 0), [6], [3], [Cause.EXPIRED]), 99_999)

    first, second = story.trails.lateness()

    assert (first.late_ms, first.inherited) == (120, False)
    assert second.inherited


def test_held_counts_what_is_leased_and_not_over() -> None:
    story = Story()
    story.acquire((0, 4), 4)
    story.log(Tick(TRACKER, 0), after_ms=LEASE_MS)
    story.acquire((0, 5), 5)
    story.acquire((0, 6), 6)
    story.acquire((0, 7), 7, by=BOB)
    story.ack((0, 6))

    held = story.trails.held(0)

    assert held == {ALICE: 1, BOB: 1}
    assert story.trails.open_rows(0) == 3


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(100), 0.99) == 99
    assert percentile([5], 1.0) == 5
    assert percentile([], 0.5) is None
