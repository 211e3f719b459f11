"""Which message of an ordering key follows which, compared with lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marq.consumer.turns import Turns
from marq.settings.queue import QueueSettings


@given(
    st.lists(st.sampled_from([None, b"a", b"b", b"c"]), max_size=20),
    st.lists(st.lists(st.integers(0, 25), max_size=4)),
)
def test_each_message_is_first_after_all_before_it_are_removed(
    keys: list[bytes | None], removals: list[list[int]]
) -> None:
    order = Turns[str](QueueSettings(ordering="key")).line("s", 0.0)
    half = len(keys) // 2
    firsts = order.add(range(half), keys[:half]) + order.add(range(half, len(keys)), keys[half:])
    lines: dict[object, list[int]] = {}
    for offset, key in enumerate(keys):
        lines.setdefault(offset if key is None else key, []).append(offset)
    assert firsts == sorted(line[0] for line in lines.values())

    for removed in removals:
        before = {line[0] for line in lines.values() if line}
        found = order.remove(removed)
        lines = {key: [offset for offset in line if offset not in removed] for key, line in lines.items()}

        after = {line[0] for line in lines.values() if line}
        assert after - before <= set(found)
        # Others have ended together with those before them.
        assert set(found) - (after - before) <= set(removed)
        assert [order.is_first(offset) for line in lines.values() for offset in line] == [
            offset == line[0] for line in lines.values() for offset in line
        ]
    assert sorted(order._keys) == sorted(offset for line in lines.values() for offset in line)
    assert sorted(order.begun) == sorted(line[0] for line in lines.values() if line)
    assert order._running == {key: 1 for key, line in lines.items() if line}
    assert order._lines.keys() <= order._running.keys()
