"""``python -m tests.verify [PART,PART]``: run the tests that `make test` leaves out; print a row for each part.

A part is a folder of tests; or ``properties``: the tests with Hypothesis, on new examples; or ``oldest``: the library's
tests with the oldest aiokafka that pyproject.toml allows. All folders run in one pytest process, because Spark's tests
leave a core idle.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

TESTS = Path(__file__).parent
#: pytest's report on each test.
REPORT = Path(".marq") / "verify.xml"
#: Parts that are not folders, and their commands.
OTHERS = {
    "properties": [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "hypothesis", "--hypothesis-profile=search"],
    "oldest": ["make", "oldest"],
}
PYTEST = ("-m", "pytest", "-q", "-n", "3", "--no-loadscope-reorder", "--durations", "20", "-m", "verify")


@dataclass
class Part:
    """Numbers of tests of a part that passed, failed or were skipped, and the sum of their seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.outcomes["passed"] > 0 and not self.outcomes["failed"]


def parts() -> list[str]:
    """Return the names of all parts."""
    files = [path for path in TESTS.rglob("test_*.py") if "mark.verify" in path.read_text(encoding="utf-8")]
    return [*sorted({path.relative_to(TESTS).parts[0] for path in files}), *OTHERS]


def chosen(arguments: Sequence[str]) -> list[str]:
    """Return the parts that the command line names, or all if it names none. Raises ValueError."""
    known, names = parts(), [name for argument in arguments for name in argument.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"ONLY={','.join(names)}: unknown part {unknown[0]!r}; the parts are {', '.join(known)}")
    return names or known


def read(report: Path) -> dict[str, Part]:
    """Return the parts of a report in JUnit's format, by folder."""
    results: dict[str, Part] = {}
    for case in ET.parse(report).iter("testcase"):
        folder = case.get("classname", "").split(".")[1:2]
        # A run that was interrupted ends with a case that names no test.
        part = results.setdefault(folder[0] if folder else "pytest", Part())
        failed = case.find("failure") is not None or case.find("error") is not None
        part.outcomes["failed" if failed else "passed" if case.find("skipped") is None else "skipped"] += 1
        part.seconds += float(case.get("time", "0"))
    return results


def run(names: Sequence[str]) -> dict[str, Part]:
    """Run parts; a part that did not finish has failed."""
    results: dict[str, Part] = {}
    folders = [name for name in names if name not in OTHERS]
    if folders:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.unlink(missing_ok=True)
        command = [sys.executable, *PYTEST, f"--junitxml={REPORT}", *[str(TESTS / name) for name in folders]]
        ended = subprocess.run(command, check=False).returncode
        reported = read(REPORT) if REPORT.exists() else {}
        results |= {name: reported.get(name, Part()) for name in folders}
        if ended not in (0, 1):
            results["pytest"] = Part(Counter(failed=1))
    for name in [name for name in names if name in OTHERS]:
        began_s = time.monotonic()
        ended = subprocess.run(OTHERS[name], check=False).returncode
        results[name] = Part(Counter({"failed" if ended else "passed": 1}), time.monotonic() - began_s)
    return results


def table(results: dict[str, Part]) -> list[str]:
    """Return the summary's lines. Folders run side by side, so their seconds add up to more than the run took."""
    lines = [f"{'part':<12} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    for name, part in results.items():
        counts = part.outcomes
        lines.append(
            f"{name:<12} {counts['passed']:>7} {counts['failed']:>7} {counts['skipped']:>8} {part.seconds:>8.0f}"
            + ("" if part.right else "  FAILED")
        )
    return lines


def main() -> int:
    try:
        names = chosen(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    results = run(names)
    right = all(part.right for part in results.values())
    print("\n".join(table(results)))
    print(f"verify: {'passed' if right else 'FAILED'} in {time.monotonic() - began_s:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
