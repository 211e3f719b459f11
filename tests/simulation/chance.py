"""The pseudo-random numbers of a world: those of ``random.Random``, drawn with less overhead."""

from __future__ import annotations

import random


class Chance(random.Random):
    """Draws the same numbers as its parent class; most of what a world draws are small integers."""

    def randint(self, a: int, b: int) -> int:
        count = b - a + 1
        if count <= 0:
            raise ValueError(f"no integer from {a} to {b}")
        bits = count.bit_length()
        drawn = self.getrandbits(bits)
        while drawn >= count:
            drawn = self.getrandbits(bits)
        return a + drawn
