"""What an examination finds: of each thing what it is like, what it should be like, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from app.plain import plain


class Level(StrEnum):
    """Only problems make the exit code 1."""

    OK = "OK"
    WARNING = "WARNING"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer; ``commands`` follow it, each on a line of its own, to be copied."""

    level: Level
    subject: str
    found: str
    expected: str = ""
    advice: str = ""
    commands: tuple[str, ...] = ()

    def __str__(self) -> str:
        expected = f" (expected: {self.expected})" if self.expected else ""
        advice = f". {self.advice[:1].upper()}{self.advice[1:]}" if self.advice else ""
        # Names of clients, keys and errors among it are what others wrote.
        commands = "".join(f"\n         {plain(command)}" for command in self.commands)
        said = plain(f"{self.level:<8} {self.subject}: {self.found}{expected}{advice}")
        return f"{said}{':' if commands else ''}{commands}"

    def document(self) -> dict[str, Any]:
        """Return the same for programs."""
        return asdict(self)


def fine(subject: str, found: str) -> Finding:
    """Return that nothing is wrong."""
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, *, expected: str = "", advice: str = "", commands: Iterable[str] = ()) -> Finding:
    """Return what works now and may not be what was meant."""
    return Finding(Level.WARNING, subject, found, expected, advice, tuple(commands))


def problem(subject: str, found: str, *, expected: str = "", advice: str = "", commands: Iterable[str] = ()) -> Finding:
    """Return what keeps something from working."""
    return Finding(Level.PROBLEM, subject, found, expected, advice, tuple(commands))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing is wrong, warnings allowed, else 1."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def report(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return all findings for programs; ``ok``: there is no problem."""
    listed = list(findings)
    return {"ok": not exit_code(listed), "findings": [finding.document() for finding in listed]}
