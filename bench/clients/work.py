"""The work that a handler does with a message: to look at it, and to wait, as if a service were asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Work:
    """Each ``each``-th message takes ``ms`` milliseconds of waiting, the others nothing; 0 ms: none takes any."""

    ms: float = 0.0
    each: int = 1

    @classmethod
    def read(cls, text: str) -> Self:
        """Read what str() gives: ``10``, or ``500/100``."""
        ms, _, each = text.partition("/")
        return cls(float(ms), int(each or 1))

    def __str__(self) -> str:
        return f"{self.ms:g}/{self.each}"

    async def do(self, value: bytes) -> None:
        if self.ms and int.from_bytes(value[:8], "big") % self.each == 0:
            await asyncio.sleep(self.ms / 1000)
