"""Mutants: known ways to get it wrong, each of which the simulation must find.

``python -m tests.simulation.mutants [--seeds N]`` changes one text of one module in memory, simulates until a seed
fails, and says which check killed it; the last line is one JSON object. A simulator that kills no mutant proves
nothing. Each mutant names the checks that may kill it, so that one which merely crashes is not taken for found.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
import types
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

#: How many seeds a mutant may survive before it has survived.
SEEDS = 400

_CORE = "marq.core."
_SIMULATION = "tests.simulation."
_ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """Replace texts of a module; ``killed_by`` names checks of tests/simulation/checker.py."""

    name: str
    module: str
    changes: Sequence[tuple[str, str]]
    killed_by: frozenset[str]


def _mutant(name: str, module: str, killed_by: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, module, changes, frozenset(killed_by.split()))


_LEASES, _TRACKER, _CLOCK, _MARKS = _CORE + "leases", _CORE + "tracker", _CORE + "clock", _CORE + "marks"
_CONSUMER, _SHELL = _SIMULATION + "consumer", _SIMULATION + "tracker"

MUTANTS = (
    # --- the consumer ---
    _mutant(
        "the offset is committed before the marker is written",
        _CONSUMER,
        "lost",
        (
            "            self._acquire(reading, own, end)\n",
            (
                "            self.group.commit(reading.source, end, reading.generation, self)\n"
                "            self._acquire(reading, own, end)\n"
            ),
        ),
    ),
    _mutant(
        "an uncertain ACQUIRE is handed out",
        _CONSUMER,
        "lost",
        ("if any(each is not Sent.OK for each in outcomes):", "if False:"),
    ),
    _mutant(
        "after an uncertain commit the messages are handed out",
        _CONSUMER,
        "handed-out-twice lost",
        (
            'commit_failed):\n            self._again(reading, own, "commit")\n',
            "commit_failed):\n            self._hand_out(reading, own, end, acquired_ms)\n",
        ),
    ),
    _mutant(
        "from_offset is always 0",
        _CONSUMER,
        "lost",
        ("after.get(queue, reading.start),", "0,"),
    ),
    # --- the tracker's shell ---
    _mutant(
        "the changelog is read before the former owner is fenced",
        _SHELL,
        "table-differs rows-left",
        ("        # 1. Fence.\n        self._fence()\n", ""),
        ("        self._begin()\n", "        self.later(20, self._fence)\n        self.later(21, self._begin)\n"),
    ),
    _mutant(
        "the rows of a failed transaction are forgotten",
        _SHELL,
        "no-row table-differs",
        ("self.pending.update(self.tracker.book.take_changes())", "self.pending = self.tracker.book.take_changes()"),
    ),
    _mutant(
        "the local table is written before the changelog",
        _SHELL,
        "table-differs quarantine",
        (
            "            write.changes = dict(self.pending)\n",
            (
                "            write.changes = dict(self.pending)\n"
                "            self.table.write(self.pending, self.table.position)\n"
            ),
        ),
    ),
    _mutant(
        "an owner that was overtaken writes on",
        _SHELL,
        "table-differs rows-left",
        ("if self._overtaken(former_epoch):", "if False:"),
    ),
    _mutant(
        "after an unknown outcome the owner goes on without a new TICK",
        _SHELL,
        "before-own-tick stuck",
        ("        self.tracker.take_over_again()\n", ""),
    ),
    # --- the lease book ---
    _mutant(
        "an ACQUIRE of a finished record opens it again",
        _LEASES,
        "book-differs fired-closed fired-twice",
        ("if offset not in marks and offset not in opened.leases]", "if offset not in opened.leases]"),
    ),
    _mutant(
        "what is acquired for the first time counts as acquired again",
        _LEASES,
        "book-differs",
        ("reacquired += len(offsets) - len(unseen)", "reacquired += len(offsets)"),
    ),
    _mutant(
        "an ACQUIRE does not take a leased record over",
        _LEASES,
        "book-differs fired-early",
        ("            self._take_over(opened, batch, again)\n", ""),
    ),
    _mutant(
        "an ACQUIRE takes over what was released or rejected",
        _LEASES,
        "book-differs fired-wrong",
        ("[offset for offset in group if opened.leases[offset].state is State.LEASED]", "list(group)"),
    ),
    _mutant(
        "a RENEW, RELEASE or REJECT counts from anyone",
        _LEASES,
        "book-differs fired-early fired-wrong",
        ("lease.holder == batch.holder and ", ""),
    ),
    _mutant(
        "an ACK counts only from the holder",
        _LEASES,
        "book-differs fired-closed",
        (
            "closed = self._close(opened, batch.offsets)",
            (
                "closed = self._close(opened, [o for o in batch.offsets"
                " if o in opened.leases and opened.leases[o].holder == batch.holder])"
            ),
        ),
    ),
    _mutant(
        "what is on its way is not remembered",
        _LEASES,
        "fired-twice stuck",
        ("            opened.firing.update(waiting)\n            self._firing_count += len(waiting)\n", ""),
    ),
    _mutant(
        "what is on its way is never forgotten",
        _LEASES,
        "stuck",
        ("            opened.firing.clear()\n", "            pass\n"),
    ),
    _mutant(
        "an aborted copy is not sent again",
        _LEASES,
        "stuck",
        ("                    self._push(fire.source, [fire.offset], lease)\n", "                    pass\n"),
    ),
    _mutant(
        "a fact does not close its message",
        _LEASES,
        "book-differs fired-closed",
        ("        self._close(opened, batch.offsets)\n        counts", "        counts"),
    ),
    _mutant(
        "one attempt more than the limit",
        _LEASES,
        "fired-wrong",
        ("lease.attempt >= settings.max_attempts", "lease.attempt > settings.max_attempts"),
    ),
    _mutant(
        "a release that does not count raises the attempt",
        _LEASES,
        "fired-wrong",
        ("lease.attempt + 1 if lease.counted else lease.attempt", "lease.attempt + 1"),
    ),
    _mutant(
        "a REJECT is forgotten",
        _LEASES,
        "book-differs",
        ("            self._replace(opened, batch.source, [offset], rejected)\n", ""),
    ),
    _mutant(
        "a row is due a little early",
        _LEASES,
        "fired-early",
        ("heap[0][0] <= now_ms and", "heap[0][0] <= now_ms + 20 and"),
    ),
    _mutant(
        "a stale entry of the heap is trusted",
        _LEASES,
        "fired-early fired-wrong",
        (
            "waiting = [o for o in offsets if opened.leases.get(o) is lease and o not in opened.firing]",
            "waiting = [o for o in offsets if o in opened.leases and o not in opened.firing]",
        ),
    ),
    _mutant(
        "deletions are not written",
        _LEASES,
        "table-differs rows-left",
        ('        changes.update(dict.fromkeys(rows.row_keys(source, opened.ended, b"r")))\n', ""),
    ),
    _mutant(
        "the second row of a message outlives it",
        _LEASES,
        "table-differs rows-left",
        ("        gone = [offset for offset in opened.ended if offset in opened.restated]\n", "        gone = []\n"),
    ),
    _mutant(
        "a lease that changed after its row was written is not written",
        _LEASES,
        "table-differs",
        ("            changes[key] = rows.encode_lease(opened.leases[offset])\n", "            pass\n"),
    ),
    _mutant(
        "coalescing forgets that a row exists from before",
        _LEASES,
        "table-differs rows-left",
        ("if pop_fresh(offset, None) is None:", "if pop_fresh(offset, None) is not None:"),
    ),
    _mutant(
        "the applied offset is not saved",
        _LEASES,
        "table-differs raised",
        ("rows.encode_applied(self.applied, self.clock)", "rows.encode_applied(min(0, self.applied), self.clock)"),
    ),
    _mutant(
        "marks are not saved",
        _LEASES,
        "table-differs",
        (
            "        self._touched_marks.clear()\n",
            (
                "        self._touched_marks.clear()\n"
                '        changes = {key: row for key, row in changes.items() if key[:1] != b"m"}\n'
            ),
        ),
    ),
    _mutant(
        "a restored lease is the one of its ACQUIRE",
        _LEASES,
        "table-differs",
        (
            "                opened.leases[offset] = lease\n                opened.restated",
            "                opened.restated",
        ),
    ),
    # --- clock, marks, tracker, copies, codec ---
    _mutant(
        "the clock is the last append time, not the largest",
        _CLOCK,
        "book-differs fired-early",
        ("        if corrected > self.now_ms:\n", "        if corrected:\n"),
    ),
    _mutant(
        "a broker's clock that jumps is believed",
        _CLOCK,
        "book-differs fired-early",
        ("if abs(self.now_ms - expected) > MAX_DRIFT_MS:", "if False:"),
    ),
    _mutant(
        "a high-water mark in place of intervals",
        _MARKS,
        "lost book-differs",
        ("return index >= 0 and offset < self._ends[index]", "return offset < self.end"),
    ),
    _mutant(
        "a gap between marks is closed",
        _MARKS,
        "lost book-differs table-differs",
        ("        high = bisect_right(starts, end)\n", "        high = len(starts)\n"),
    ),
    _mutant(
        "due by the last record read, not by an own TICK",
        _TRACKER,
        "fired-early",
        ("return self.book.due(self._tick_clock_ms)", "return self.book.due(self.book.clock.now_ms)"),
    ),
    _mutant(
        "the own TICK is not awaited",
        _TRACKER,
        "before-own-tick",
        (
            "if self._tick_clock_ms is None or self._awaiting_tick:\n            return []\n",
            "if self._tick_clock_ms is None:\n            self._tick_clock_ms = self.book.clock.now_ms\n",
        ),
    ),
    _mutant(
        "a TICK from before the new fencing counts",
        _TRACKER,
        "before-own-tick fired-twice",
        ("if batch.monotonic_ms != self._tick_sent_at_ms:", "if False:"),
    ),
    _mutant(
        "an unreadable record is not kept",
        _TRACKER,
        "quarantine",
        ("            self.unreadable.append((offset, value, str(error)))\n", ""),
    ),
    _mutant(
        "a copy loses the headers of its sender",
        _CORE + "copies",
        "fidelity",
        ("[*kept, *own]", "[*own]"),
    ),
    _mutant(
        "a copy's id is its parent's place",
        _CORE + "copies",
        "fidelity",
        ("(ID_HEADER, past.id.encode())", "(ID_HEADER, record_id(fire.source, fire.offset).encode())"),
    ),
    _mutant(
        "attempts are not written",
        _CORE + "markers",
        "book-differs fired-wrong fidelity",
        ("    if given.attempts is not None:\n", "    if False:\n"),
    ),
)


class _MutantLoader(InspectLoader):
    """Loads one module from a changed text."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        self._mutant = mutant
        self._path = path

    def get_source(self, fullname: str) -> str:
        source = Path(self._path).read_text()
        for old, new in self._mutant.changes:
            if source.count(old) != 1:
                raise AssertionError(f"mutant {self._mutant.name!r}: {source.count(old)} places with {old!r}")
            source = source.replace(old, new)
        return source

    def get_filename(self, fullname: str) -> str:
        return self._path


class _MutantFinder(MetaPathFinder):
    """Finds the mutated module before Python finds the original."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        file = str(_ROOT.joinpath(*fullname.split("."))) + ".py"
        return ModuleSpec(fullname, _MutantLoader(self._mutant, file), origin=file)


class Verdict(NamedTuple):
    """How a mutant fared: ``check`` is empty when it survived."""

    name: str
    check: str
    seed: int
    text: str
    expected: bool


def judge(mutant: Mutant, seeds: int) -> Verdict:
    """Simulate a mutant until a seed fails; to be called in a process of its own, for it replaces modules."""
    for name in [name for name in sys.modules if name == "marq" or name.startswith(("marq.", _SIMULATION))]:
        if name != __name__:
            del sys.modules[name]
    # The core is pure: it needs nothing of the package around it, which would only be slow to import.
    package = types.ModuleType("marq")
    package.__path__ = [str(_ROOT / "marq")]
    sys.modules["marq"] = package
    finder = _MutantFinder(mutant)
    sys.meta_path.insert(0, finder)
    try:
        simulate = importlib.import_module("tests.simulation.world").simulate
    except (AssertionError, SyntaxError) as error:
        return Verdict(mutant.name, "", -1, f"it can't be made: {error}", False)
    finally:
        sys.meta_path.remove(finder)
    for seed in range(seeds):
        result = simulate(seed)
        if result.failed:
            return Verdict(mutant.name, result.check, seed, result.failed, result.check in mutant.killed_by)
    return Verdict(mutant.name, "", -1, "", False)


def judge_all(seeds: int) -> list[Verdict]:
    """Judge all mutants, on all cores."""
    from tests.simulation.seeds import processes

    with processes() as pool:
        return list(pool.map(judge, MUTANTS, [seeds] * len(MUTANTS)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds a mutant may survive")
    arguments = parser.parse_args()
    began = time.monotonic()
    verdicts = judge_all(arguments.seeds)
    for verdict in verdicts:
        how = f"killed by {verdict.check} at seed {verdict.seed}" if verdict.check else f"SURVIVED {verdict.text}"
        unexpected = "" if verdict.expected or not verdict.check else f" (NOT ITS CHECK: {verdict.text[:200]})"
        print(f"{verdict.name:62s} {how}{unexpected}")
    killed = sum(verdict.expected for verdict in verdicts)
    report = {
        "mutants": len(verdicts),
        "killed": killed,
        "survived": [verdict.name for verdict in verdicts if not verdict.expected],
        "seeds": arguments.seeds,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report))
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
