"""Which message of an ordering key follows which.

It uses dictionaries instead of an object for each message or key: 100,000 messages may wait, and the garbage
collector would visit all their objects, but it skips dictionaries of numbers and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class LineOrder:
    """The messages with each key, in offset order."""

    __slots__ = ("_after", "_before", "_keys", "_last")

    def __init__(self) -> None:
        #: The key of each message that has one.
        self._keys: dict[int, bytes] = {}
        #: The last message of each key.
        self._last: dict[bytes, int] = {}
        #: The next and the previous message of the same key.
        self._after: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def add(self, offsets: Iterable[int], keys: Iterable[bytes | None]) -> list[int]:
        """Append messages to the lines of their keys, in the order of the log; return those that are first."""
        firsts = []
        of, last, after, before = self._keys, self._last, self._after, self._before
        for offset, key in zip(offsets, keys, strict=True):
            if key is None:
                firsts.append(offset)
                continue
            of[offset] = key
            previous = last.get(key)
            last[key] = offset
            if previous is None:
                firsts.append(offset)
            else:
                after[previous] = offset
                before[offset] = previous
        return firsts

    def remove(self, offsets: Sequence[int]) -> list[int]:
        """Remove messages; return those that are now the first of their lines."""
        firsts = []
        of, last, after, before = self._keys, self._last, self._after, self._before
        for offset in offsets:
            key = of.pop(offset, None)
            if key is None:
                continue
            following, previous = after.pop(offset, None), before.pop(offset, None)
            if previous is not None:
                self._join(key, previous, following)
            elif following is None:
                del last[key]
            else:
                del before[following]
                firsts.append(following)
        return firsts

    def _join(self, key: bytes, previous: int, following: int | None) -> None:
        if following is None:
            self._last[key] = previous
            del self._after[previous]
        else:
            self._after[previous] = following
            self._before[following] = previous

    def is_first(self, offset: int) -> bool:
        """Return whether no message of the same key comes before this one."""
        return offset not in self._before
