"""A queue that moves again and again, in virtual time: every accepted message is read, even if clients are late."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from marq.settings.placements import EVERYWHERE, GRACE_S, SENT_S, SYNCED_S, Placement, subset

PARTITIONS = 6
SEEDS = 300
STEPS = 600


@dataclass
class Sending:
    """A message on its way, and by what its sender goes."""

    number: int
    synced_s: float
    moves: int
    partition: int
    until_s: float


@dataclass
class Sender:
    synced_s: float = 0.0
    moves: int = 0
    known: Placement = EVERYWHERE


@dataclass
class World:
    rng: random.Random
    grace_s: float
    now_s: float = 0.0
    #: Each placement that was ever written; the last one holds.
    placements: list[Placement] = field(default_factory=lambda: [EVERYWHERE])
    logs: list[list[int]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    positions: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    senders: list[Sender] = field(default_factory=lambda: [Sender() for _ in range(3)])
    on_their_way: list[Sending] = field(default_factory=list)
    accepted: set[int] = field(default_factory=set)
    read: list[int] = field(default_factory=list)
    wish: int | None = None
    seen: tuple[int, float] | None = None
    reads: Placement = EVERYWHERE
    away: bool = False
    sent: int = 0

    def step(self) -> None:
        self.now_s += self.rng.expovariate(1 / 3)
        for sending in [sending for sending in self.on_their_way if sending.until_s <= self.now_s]:
            self.on_their_way.remove(sending)
            self._arrive(sending)
        chance, sender = self.rng.random(), self.rng.choice(self.senders)
        if chance < 0.35:
            self._send(sender)
        elif chance < 0.55:
            sender.synced_s, sender.moves, sender.known = self.now_s, len(self.placements), self.placements[-1]
        elif chance < 0.75:
            self.keep()
        elif chance < 0.9:
            self.receive()
        elif chance < 0.93:
            self.reads = self.placements[-1]
        elif chance < 0.95:
            self.away = not self.away
        elif chance < 0.97:
            # Another worker keeps the placements.
            self.seen = None
        else:
            self.wish = self.rng.choice([1, 2, 3, None])

    def _send(self, sender: Sender) -> None:
        if self.now_s - sender.synced_s > SYNCED_S:
            return
        sends = range(PARTITIONS) if sender.known.sends is None else sender.known.sends
        takes_s = self.rng.choice([0.1, 5.0, 70.0])
        partition = self.rng.choice(list(sends))
        self.on_their_way.append(
            Sending(self.sent, sender.synced_s, sender.moves, partition, self.now_s + takes_s * self.rng.random())
        )
        self.sent += 1

    def _arrive(self, sending: Sending) -> None:
        # Its time is the latest at which it may have been written; what is not accepted is written all the same.
        self.logs[sending.partition].append(sending.number)
        if sending.until_s - sending.synced_s <= SENT_S or sending.moves == len(self.placements):
            self.accepted.add(sending.number)

    def keep(self) -> None:
        placement, move = self.placements[-1], len(self.placements)
        wanted = subset("queue", PARTITIONS, self.wish)
        if placement.sends != wanted:
            self.placements.append(placement.moved(wanted))
        elif placement.settled:
            return
        elif placement.ends is None:
            if self.seen is None or self.seen[0] != move:
                self.seen = (move, self.now_s)
            elif self.now_s - self.seen[1] >= self.grace_s:
                ends = {partition: len(self.logs[partition]) for partition in placement.former(PARTITIONS)}
                self.placements.append(placement.ended(ends))
        elif all(self.positions[partition] >= end for partition, end in placement.ends.items()):
            self.placements.append(placement.drained())

    def receive(self) -> None:
        if self.away:
            return
        for partition in range(PARTITIONS) if self.reads.reads is None else self.reads.reads:
            self.read += self.logs[partition][self.positions[partition] :]
            self.positions[partition] = len(self.logs[partition])

    def come_to_rest(self) -> None:
        self.now_s += 1_000
        for sending in self.on_their_way:
            self._arrive(sending)
        self.on_their_way, self.away = [], False
        while True:
            self.reads = self.placements[-1]
            self.receive()
            self.now_s += self.grace_s
            self.keep()
            if self.placements[-1].settled and self.reads == self.placements[-1]:
                return


def lost(seed: int, grace_s: float) -> set[int]:
    world = World(random.Random(seed), grace_s)
    for _ in range(STEPS):
        world.step()
    world.come_to_rest()
    assert len(world.read) == len(set(world.read)), "read twice"
    assert len(world.placements) > 5, "the queue has moved"
    return world.accepted - set(world.read)


@pytest.mark.parametrize("seed", range(0, SEEDS, 50))
def test_what_was_accepted_is_read_once(seed: int) -> None:
    assert {number: found for number in range(seed, seed + 50) if (found := lost(number, GRACE_S))} == {}


def test_with_a_shorter_limit_messages_would_be_lost() -> None:
    assert any(lost(seed, SYNCED_S / 2) for seed in range(SEEDS))
