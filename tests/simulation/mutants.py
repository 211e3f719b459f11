"""Mutants: known ways to get it wrong, each of which the simulation must find.

``python -m tests.simulation.mutants [--seeds N]`` changes some texts of modules in memory, simulates until a seed
fails, and says which check killed it; the last line is one JSON object. A simulator that kills no mutant proves
nothing. Each mutant names the checks that may kill it, so that one which merely crashes is not taken for found.

With ``--blind`` nothing is looked at but the histories, as in a run on a real broker: what is killed then, the checker
would find there, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import types
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from tests.simulation.mutant import Mutant
from tests.simulation.mutants_of_core import CORE_MUTANTS
from tests.simulation.mutants_of_deduplication import DEDUPLICATION_MUTANTS
from tests.simulation.mutants_of_delays import DELAY_MUTANTS
from tests.simulation.mutants_of_expiry import EXPIRY_MUTANTS
from tests.simulation.mutants_of_limits import LIMIT_MUTANTS
from tests.simulation.mutants_of_ordering import ORDERING_MUTANTS
from tests.simulation.mutants_of_priorities import PRIORITY_MUTANTS
from tests.simulation.mutants_of_purges import PURGE_MUTANTS
from tests.simulation.mutants_of_shells import SHELL_MUTANTS
from tests.simulation.mutants_of_subscriptions import SUBSCRIPTION_MUTANTS

#: Number of seeds after which a mutant counts as a survivor.
SEEDS = 2_000
#: Packages that may have imported a mutated module; reloaded for each mutant.
_RELOADED = ("marq", "lab.proof", "tests.simulation.")

_ROOT = Path(__file__).resolve().parents[2]

MUTANTS = (
    *CORE_MUTANTS, *DEDUPLICATION_MUTANTS, *DELAY_MUTANTS, *EXPIRY_MUTANTS, *LIMIT_MUTANTS, *ORDERING_MUTANTS,
    *PRIORITY_MUTANTS, *PURGE_MUTANTS, *SHELL_MUTANTS, *SUBSCRIPTION_MUTANTS,
)  # fmt: skip


class _MutantLoader(InspectLoader):
    """Loads one module from a changed text."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        self._mutant = mutant
        self._path = path

    def get_source(self, fullname: str) -> str:
        source = Path(self._path).read_text()
        for old, new in self._mutant.changes[fullname]:
            if source.count(old) != 1:
                raise AssertionError(f"mutant {self._mutant.name!r}: {source.count(old)} places with {old!r}")
            source = source.replace(old, new)
        return source

    def get_filename(self, fullname: str) -> str:
        return self._path


class _MutantFinder(MetaPathFinder):
    """Finds mutated modules before Python finds the originals."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._mutant.changes:
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


def judge(mutant: Mutant, seeds: int, blind: bool = False) -> Verdict:
    """Simulate a mutant until a seed fails; call it in a process of its own, because it replaces modules."""
    kept = (__name__, "tests.simulation", "tests.simulation.mutant")
    for name in [name for name in sys.modules if name.startswith(_RELOADED) and name not in kept]:
        del sys.modules[name]
        # Else `from package import module` would still find it there.
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
    # The simulation needs nothing from the package's __init__, which would only be slow to import.
    package = types.ModuleType("marq")
    package.__path__ = [str(_ROOT / "marq")]
    sys.modules["marq"] = package
    finder = _MutantFinder(mutant)
    sys.meta_path.insert(0, finder)
    try:
        world = importlib.import_module("tests.simulation.world")
        swarm = importlib.import_module("tests.simulation.swarm")
    except (AssertionError, SyntaxError) as error:
        return Verdict(mutant.name, "", -1, f"it can't be made: {error}", False)
    finally:
        sys.meta_path.remove(finder)
    plan = world.Plan(faults=swarm.only(**mutant.faults) if mutant.faults else None, blind=blind, **(mutant.plan or {}))
    for seed in range(seeds):
        result = world.simulate(seed, plan)
        if result.failed:
            expected = blind or result.check in mutant.killed_by
            return Verdict(mutant.name, result.check, seed, result.failed, expected)
    return Verdict(mutant.name, "", -1, "", False)


def judge_all(
    seeds: int, mutants: Sequence[Mutant] = MUTANTS, cores: int | None = None, *, blind: bool = False
) -> list[Verdict]:
    """Judge all mutants, on all cores."""
    from tests.simulation.seeds import processes

    with processes(cores) as pool:
        return list(pool.map(judge, mutants, [seeds] * len(mutants), [blind] * len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds a mutant may survive")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their names")
    parser.add_argument("--processes", type=int, help="how many at a time (default: as many as cores)")
    parser.add_argument("--blind", action="store_true", help="look at nothing but the histories; any check may kill")
    given = parser.parse_args()
    began = time.monotonic()
    chosen = [mutant for mutant in MUTANTS if given.only in mutant.name and not (given.blind and mutant.inside)]
    verdicts = judge_all(given.seeds, chosen, given.processes, blind=given.blind)
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        how = f"killed by {verdict.check} at seed {verdict.seed}" if verdict.check else f"SURVIVED {verdict.text}"
        unexpected = "" if verdict.expected or not verdict.check else f" (NOT ITS CHECK: {verdict.text[:200]})"
        print(f"{mutant.about:36s} {verdict.name:78s} {how}{unexpected}")
    killed = sum(verdict.expected for verdict in verdicts)
    report = {
        "mutants": len(verdicts),
        "killed": killed,
        "survived": [verdict.name for verdict in verdicts if not verdict.expected],
        "seeds": given.seeds,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report))
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
