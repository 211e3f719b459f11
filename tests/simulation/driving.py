"""Runs coroutines of the product in the simulated world: each goes on when what it waits for has come."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Answer:
    """What a coroutine waits for."""

    def __init__(self) -> None:
        self._given = False
        self._error: Exception | None = None
        self._listener: Callable[[], None] | None = None

    def give(self, error: Exception | None = None) -> None:
        """Let the coroutine go on, or raise the error where it waits."""
        self._given, self._error = True, error
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def __await__(self) -> Generator[Answer, None, None]:
        if not self._given:
            yield self
        if self._error is not None:
            raise self._error


def drive(coroutine: Coroutine[Any, Any, Any], ended: Callable[[Any], None]) -> None:
    """Run a coroutine; ``ended`` gets its result. A process that dies never answers, and so its coroutines end."""

    def step() -> None:
        try:
            answer = coroutine.send(None)
        except StopIteration as stop:
            ended(stop.value)
        else:
            answer.listen(step)

    step()
