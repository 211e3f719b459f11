"""Which rule of a queue's settings an exception meets."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType

import pytest

import marq
from marq.client.exception_rules import REJECTED, policy_for
from marq.core.storage.rows import row_key
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings, check_document, queue_settings
from marq.wire.error_texts import error_of, traceback_of
from marq.wire.markers import BACKOFF, Reject, Release
from tests.unit.client.fakes import P0, FakeRecord

FIRST, SECOND = Backoff(base_ms=1), Backoff(base_ms=2)


class Busy(ConnectionError):
    class Inner(Exception):
        pass


@pytest.mark.parametrize(
    ("errors", "error", "expected"),
    [
        ({"ValueError": FIRST}, ValueError(), FIRST),
        ({"ValueError": None}, ValueError(), REJECTED),
        ({"ValueError": FIRST}, KeyError(), None),
        ({"builtins.ValueError": FIRST}, ValueError(), FIRST),
        ({"ValueError": FIRST}, json.JSONDecodeError("", "", 0), FIRST),
        ({"json.decoder.JSONDecodeError": FIRST}, json.JSONDecodeError("", "", 0), FIRST),
        # The public name of the class.
        ({"json.JSONDecodeError": FIRST}, json.JSONDecodeError("", "", 0), FIRST),
        ({"asyncio.TimeoutError": FIRST}, TimeoutError(), FIRST),
        ({"OSError": FIRST, "ConnectionError": SECOND}, Busy(), SECOND),
        ({"ConnectionError": SECOND, "OSError": FIRST}, Busy(), SECOND),
        ({"Exception": None, "OSError": FIRST}, Busy(), FIRST),
        ({f"{__name__}.Busy": FIRST, "ConnectionError": SECOND}, Busy(), FIRST),
        ({f"{__name__}.Busy.Inner": FIRST}, Busy.Inner(), FIRST),
        ({"not_loaded.Error": FIRST, "json.nothing.there": SECOND, "json.loads": SECOND}, Busy(), None),
    ],
)
def test_the_class_counts_that_is_nearest(
    errors: dict[str, Backoff | None], error: Exception, expected: object
) -> None:
    assert policy_for(error, errors) == expected


def test_a_name_counts_as_soon_as_its_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"loaded_later.Public": None, "OSError": FIRST}
    assert policy_for(Busy(), errors) == FIRST

    module = ModuleType("loaded_later")
    module.Public = Busy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "loaded_later", module)

    assert policy_for(Busy(), errors) == REJECTED


def settings(**document: object) -> QueueSettings:
    return queue_settings(check_document(document, "here"))


async def test_an_exception_releases_by_its_own_backoff_or_rejects(make_rig) -> None:
    jittered = Backoff(base_ms=4_000)
    rules = settings(errors={"ValueError": "reject", "ConnectionError": [2, 9], "OSError": {"base": 4}})
    rig = make_rig(queue=lambda _: rules)
    second = (("marq-attempt", b"2"),)
    rig.reader.add(P0, *[FakeRecord(offset, headers=second if offset == 1 else ()) for offset in range(5)])
    errors = [ConnectionError("a"), ConnectionError("b"), OSError("c"), KeyError("d"), ValueError("no such user")]

    for message, error in zip(await rig.take(5), errors, strict=True):
        with pytest.raises(type(error)):
            async with message:
                raise error
    await rig.settled()

    (released,) = rig.settler.of(Release)
    computed = jittered.delay_ms(1, row_key("q", P0, 2))
    assert dict(zip(released.offsets, released.delays_ms, strict=True)) == {0: 2_000, 1: 9_000, 2: computed, 3: BACKOFF}
    [reason] = rig.settler.of(Reject)[0].reasons
    assert error_of(reason) == "ValueError: no such user"
    assert traceback_of(reason).endswith("raise error\nValueError: no such user")


async def test_what_a_handler_says_itself_goes_before_the_rules(make_rig) -> None:
    rules = settings(errors={"Exception": "reject"})
    rig = make_rig(queue=lambda _: rules)
    rig.add(3)

    retried, rejected, cancelled = await rig.take(3)
    async with retried:
        raise marq.Retry(delay=3)
    async with rejected:
        raise marq.Reject("why")
    with pytest.raises(asyncio.CancelledError):
        async with cancelled:
            raise asyncio.CancelledError
    await rig.settled()

    assert {offset for each in rig.settler.of(Release) for offset in each.offsets} == {0, 2}
    assert list(rig.settler.of(Reject)[0].reasons) == ["why"]


async def test_rules_that_change_count_for_the_next_messages(make_rig) -> None:
    said = [settings(), settings(errors={"OSError": "reject"})]
    rig = make_rig(queue=lambda _: said[0])

    for offset in (0, 1):
        rig.reader.add(P0, FakeRecord(offset))
        [message] = await rig.take(1)
        with pytest.raises(OSError, match="x"):
            async with message:
                raise OSError("x")
        del said[0:-1]
    await rig.settled()

    assert [list(each.offsets) for each in rig.settler.of(Release)] == [[0]]
    assert [list(each.offsets) for each in rig.settler.of(Reject)] == [[1]]
