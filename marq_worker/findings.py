"""Findings about a namespace: what is wrong, what is expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from marq_worker.readable import plain


class Level(StrEnum):
    """Only problems make the exit code 1."""

    OK = "OK"
    WARNING = "WARNING"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A line of the answer; ``commands`` follow on lines of their own, to be copied."""

    level: Level
    subject: str
    found: str
    expected: str = ""
    advice: str = ""
    commands: tuple[str, ...] = ()

    def __str__(self) -> str:
        expected = f" (expected: {self.expected})" if self.expected else ""
        advice = f". {capitalized(self.advice)}" if self.advice else ""
        # They contain names, keys and errors that others wrote.
        commands = "".join(f"\n         {plain(command)}" for command in self.commands)
        line = plain(f"{self.level:<8} {self.subject}: {self.found}{expected}{advice}")
        return f"{line}{':' if commands else ''}{commands}"


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def fine(subject: str, found: str) -> CheckFinding:
    """Return a finding that nothing is wrong."""
    return CheckFinding(Level.OK, subject, found)


def warning(
    subject: str, found: str, *, expected: str = "", advice: str = "", commands: Iterable[str] = ()
) -> CheckFinding:
    """Return a finding about something that works, but may not be intended."""
    return CheckFinding(Level.WARNING, subject, found, expected, advice, tuple(commands))


def problem(
    subject: str, found: str, *, expected: str = "", advice: str = "", commands: Iterable[str] = ()
) -> CheckFinding:
    """Return a finding about something that does not work."""
    return CheckFinding(Level.PROBLEM, subject, found, expected, advice, tuple(commands))


def exit_code(findings: Iterable[CheckFinding]) -> int:
    """Return 1 if a finding is a problem, else 0."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def report(findings: Iterable[CheckFinding]) -> dict[str, Any]:
    listed = list(findings)
    return {"ok": not exit_code(listed), "findings": [asdict(finding) for finding in listed]}
