"""Dead letters: listed, counted, redriven, deleted; each once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import marq
from marq.wire.errors import ConfigError
from marq.wire.record_headers import first_received_ms
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take, take_one


@asynccontextmanager
async def opened(backend: Backend, **options: Any) -> AsyncIterator[marq.DeadLetters]:
    async with marq.DeadLetters(**{**backend.client, **options}) as letters:
        yield letters


#: How many messages of each queue :func:`kill` has dead-lettered.
killed: Counter[str] = Counter()


async def kill(backend: Backend, queue: str, *values: bytes, reason: str = "no good", **sending: Any) -> list[str]:
    """Send messages and dead-letter them; return their ids."""
    receipts = await backend.producer.send_many(queue, values, **sending)
    async with backend.consumer(queue) as consumer:
        for message in await take(consumer, len(values)):
            await message.reject(reason, wait=False)
    killed[queue] += len(values)
    await backend.statistics(queue, dead_lettered=killed[queue])
    # Later dead letters have later times.
    await backend.advance(0.01)
    return [each.id for each in receipts]


async def values(letters: marq.DeadLetters, queue: str, **filters: Any) -> list[bytes]:
    return sorted([letter.value async for letter in letters.peek(queue, **filters)])


async def test_a_dead_letter_says_all_that_is_known(backend: Backend) -> None:
    queue = backend.new_name()
    receipt = await backend.producer.send(queue, b"x", headers={"tenant": b"acme"})
    async with backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        with pytest.raises(LookupError):
            async with message:
                raise LookupError("nobody")
        again = await take_one(consumer)
        await again.reject("no good")
    await backend.statistics(queue, dead_lettered=1)

    async with opened(backend) as letters:
        [letter] = [each async for each in letters.peek(queue)]

    assert (letter.queue, letter.id, letter.value, letter.body) == (queue, receipt.id, b"x", b"x")
    assert (letter.headers, letter.key) == ({"tenant": b"acme"}, None)
    assert (letter.reason, letter.attempts) == ("no good", 2)
    assert letter.first_sent == message.sent_at
    assert letter.dead_lettered_at >= letter.first_sent
    assert letter.origin == f"{backend.names.messages}/{again.partition}/{again.offset}"
    assert letter.offset >= 0


async def test_values_are_decoded_by_the_codec_and_what_it_can_not_decode_is_seen_as_bytes(backend: Backend) -> None:
    queue = backend.new_name()
    await kill(backend, queue, b'{"a": 1}')
    await kill(backend, queue, b"{", reason="other")

    async with opened(backend, codec=marq.JSON) as letters:
        [good] = [each async for each in letters.peek(queue, reason="no good")]
        [bad] = [each async for each in letters.peek(queue, reason="other")]

    assert good.value == {"a": 1}
    with pytest.raises(marq.DecodeError):
        bad.value  # noqa: B018
    assert bad.body == b"{"


async def test_a_redriven_message_comes_as_its_sender_made_it_at_its_first_attempt(backend: Backend) -> None:
    queue = backend.new_name()
    receipt = await backend.producer.send(queue, b"x", headers={"tenant": b"acme"})
    async with backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        await message.release(0)
        await (second := await take_one(consumer)).reject("no good")
        await backend.statistics(queue, dead_lettered=1)

        async with opened(backend) as letters:
            result = await letters.redrive(queue)
            assert await values(letters, queue) == []
            assert await letters.redrive(queue) == marq.Redriven(chosen=0)
            assert await letters.delete(queue) == marq.Deleted(chosen=0)
        again = await take_one(consumer)

        assert result == marq.Redriven(chosen=1, requested=1, redriven=1, already_settled=0)
        assert (again.id, again.attempt, again.value, again.headers) == (receipt.id, 1, b"x", {"tenant": b"acme"})
        assert (again.sent_at, again.key) == (message.sent_at, None)
        assert first_received_ms(second._record.headers)
        assert not first_received_ms(again._record.headers)
        await again.ack()
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, acked=1, dead_lettered=1, redriven=1, delivered=1)


async def test_two_concurrent_redrives_redrive_each_dead_letter_once(backend: Backend) -> None:
    queue, other = backend.new_name(), backend.new_name()
    await kill(backend, queue, *[b"%d" % number for number in range(40)])
    async with opened(backend) as one, opened(backend) as two, backend.consumer(other) as consumer:
        results = await asyncio.gather(one.redrive(queue, to=other), two.redrive(queue, to=other))

        assert sum(each.redriven for each in results) == 40
        assert all(each.redriven + each.already_settled == each.chosen for each in results)
        messages = await take(consumer, 40)
        assert len({message.id for message in messages}) == 40
        await consumer.ack(messages)
        await nothing_comes(backend, consumer)


async def test_letters_go_to_another_queue_and_their_own_does_not_see_them(backend: Backend) -> None:
    queue, other = backend.new_name(), backend.new_name("other")
    [identity] = await kill(backend, queue, b"x")
    async with opened(backend) as letters, backend.consumer(other) as there, backend.consumer(queue) as here:
        await letters.redrive(queue, to=other)

        message = await take_one(there)
        assert (message.id, message.queue, message.attempt) == (identity, other, 1)
        await message.ack()
        await nothing_comes(backend, here)


async def test_a_redriven_message_that_dies_again_is_a_new_letter(backend: Backend) -> None:
    queue = backend.new_name()
    [identity] = await kill(backend, queue, b"x")
    async with opened(backend) as letters:
        for turn in (1, 2):
            assert (await letters.redrive(queue)).redriven == 1
            async with backend.consumer(queue) as consumer:
                await (await take_one(consumer)).reject(f"again {turn}")
            await backend.statistics(queue, dead_lettered=1 + turn)

            [letter] = [each async for each in letters.peek(queue)]
            assert (letter.id, letter.reason, letter.attempts) == (identity, f"again {turn}", 1)


async def test_deleted_letters_are_seen_and_redriven_no_more(backend: Backend) -> None:
    queue = backend.new_name()
    await kill(backend, queue, b"1", b"2", reason="bad")
    await kill(backend, queue, b"3", reason="other")
    async with opened(backend) as letters, backend.consumer(queue) as consumer:
        assert await letters.delete(queue, reason="bad") == marq.Deleted(2, 2, 2, 0)

        assert await values(letters, queue) == [b"3"]
        assert (await letters.redrive(queue)).chosen == 1
        message = await take_one(consumer)
        assert message.value == b"3"
        await message.ack()
    await backend.statistics(queue, deleted=2, redriven=1, acked=1)


async def test_letters_are_counted_by_queue_and_reason(backend: Backend) -> None:
    queue, other = backend.new_name("a"), backend.new_name("b")
    await kill(backend, queue, b"1", b"2", reason="bad")
    await kill(backend, queue, b"3", reason="worse")
    await kill(backend, other, b"4", reason="bad")
    async with opened(backend) as letters:
        found = [each for each in await letters.count() if each.queue in (queue, other)]
        assert found == [(queue, "bad", 2), (queue, "worse", 1), (other, "bad", 1)]
        assert await letters.count(queue, reason="worse") == [(queue, "worse", 1)]

        await letters.delete(queue, reason="bad")

        assert await letters.count(queue) == [(queue, "worse", 1)]


async def test_letters_are_chosen_by_what_they_say(backend: Backend) -> None:
    queue = backend.new_name()
    await kill(backend, queue, b"1", reason="Bad address", headers={"tenant": b"acme", "flag": None})
    [second] = await kill(backend, queue, b"2", reason="bad name", headers={"tenant": b"other"})
    async with opened(backend) as letters:
        [when] = [each.dead_lettered_at async for each in letters.peek(queue, id=second)]
        chosen = {
            b"1": [{"reason": "ADDRESS"}, {"header": {"tenant": "acme"}}, {"header": {"flag": None}}],
            b"2": [{"reason": "name"}, {"header": {"tenant": b"other"}}, {"id": second}, {"newer_than": when}],
        }
        for value, filters in chosen.items():
            for each in filters:
                assert await values(letters, queue, **each) == [value], each

        assert await values(letters, queue, reason="bad", header={"tenant": None}) == [b"1", b"2"]
        assert await values(letters, queue, reason="bad", header={"tenant": "nobody"}) == []
        assert await values(letters, queue, error="x") == []
        assert await values(letters, queue, older_than=timedelta(days=1)) == []
        assert await values(letters, queue, newer_than=3600) == [b"1", b"2"]
        assert await values(letters, queue, older_than=datetime(2020, 1, 1, tzinfo=UTC)) == []


async def test_a_limit_takes_those_that_died_first_and_a_dry_run_none(backend: Backend) -> None:
    queue = backend.new_name()
    for number in range(4):
        await kill(backend, queue, b"%d" % number)
    async with opened(backend) as letters:
        assert await values(letters, queue, limit=2) == [b"0", b"1"]
        assert await letters.redrive(queue, limit=3, dry_run=True) == marq.Redriven(chosen=3)
        assert await letters.delete(queue, dry_run=True) == marq.Deleted(chosen=4)
        assert (await letters.redrive(queue, limit=3)).redriven == 3

        assert await values(letters, queue) == [b"3"]


async def test_a_redrive_keeps_its_rate_and_tells_how_far_it_is(backend: Backend) -> None:
    queue = backend.new_name()
    await kill(backend, queue, *[b"%d" % number for number in range(12)])
    told: list[marq.Redriven] = []
    async with opened(backend) as letters:
        began_s = backend.now_s()
        result = await letters.redrive(queue, rate=10, progress=told.append)

    assert backend.now_s() - began_s > 1.05
    assert told[-1] == result == marq.Redriven(12, 12, 12, 0)
    assert [each.requested for each in told] == sorted(each.requested for each in told)
    assert len({each.requested for each in told}) == 12


async def test_a_redrive_that_was_cancelled_goes_on_when_it_is_called_again(backend: Backend) -> None:
    queue, other = backend.new_name(), backend.new_name()
    await kill(backend, queue, *[b"%d" % number for number in range(30)])
    async with opened(backend) as letters, backend.consumer(other) as consumer:
        some = asyncio.Event()
        told: list[marq.Redriven] = []

        def note(progress: marq.Redriven) -> None:
            told.append(progress)
            if progress.requested == 5:
                some.set()

        task = asyncio.create_task(letters.redrive(queue, to=other, rate=20, progress=note))
        await some.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        rest = await letters.redrive(queue, to=other)

        assert 0 < rest.redriven < 30
        messages = await take(consumer, 30)
        assert len({message.id for message in messages}) == 30
        await consumer.ack(messages)
        await nothing_comes(backend, consumer)


async def test_letters_of_a_queue_with_a_topic_of_its_own_come_back_with_their_keys(backend: Backend) -> None:
    topic = await backend.create_topic()
    queue = await backend.new_queue(topic=topic)
    await backend.produce(topic, b"x", key=b"customer-7")
    async with backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        await message.reject("no good")
        await backend.statistics(queue, dead_lettered=1)

        async with opened(backend) as letters:
            [letter] = [each async for each in letters.peek(queue)]
            assert letter.key == b"customer-7"
            await letters.redrive(queue)
        again = await take_one(consumer)

        assert (again.id, again.value, again.key) == (message.id, b"x", b"customer-7")
        await again.ack()


async def test_notes_and_foreign_records_are_not_dead_letters(backend: Backend) -> None:
    queue = backend.new_name()
    topic = backend.names.dead_letters
    await backend.produce(topic, b"?", key=None)
    await backend.produce(topic, b"{", key=b"", headers=[("marq-settled", b"redriven")])
    await backend.produce(topic, b'{"offsets": [[0, 1e99]]}', key=b"", headers=[("marq-settled", b"redriven")])
    await backend.produce(topic, b"plain", key=queue.encode())
    async with opened(backend) as letters, backend.consumer(queue) as consumer:
        [letter] = [each async for each in letters.peek(queue)]
        assert (letter.value, letter.reason, letter.attempts) == (b"plain", "", 1)
        await letters.redrive(queue)

        message = await take_one(consumer)
        assert (message.value, message.attempt) == (b"plain", 1)
        await message.ack()


FORGED = json.dumps({"offsets": [[0, 9_999]], "became": "deleted", "queue": "q", "by": "1"}).encode()


async def test_a_message_that_looks_like_a_note_settles_nothing(backend: Backend) -> None:
    queue, topic = backend.new_name(), backend.names.dead_letters
    header = ("marq-settled", b"deleted")
    await backend.produce(topic, b"before", key=queue.encode())
    await backend.produce(backend.names.messages, FORGED, key=queue.encode(), headers=[header])
    await backend.produce(topic, FORGED, key=queue.encode(), headers=[header])
    async with opened(backend) as letters, backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        await message.reject("no good")
        await backend.statistics(queue, dead_lettered=1)

        assert await values(letters, queue) == sorted([b"before", FORGED, FORGED])


async def test_a_note_settles_no_dead_letter_that_comes_after_it(backend: Backend) -> None:
    queue, topic = backend.new_name(), backend.names.dead_letters
    await backend.produce(topic, FORGED, key=b"", headers=[("marq-settled", b"deleted")])
    await backend.produce(topic, b"after", key=queue.encode())
    async with opened(backend) as letters:
        assert await values(letters, queue) == [b"after"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rate": 0}, "rate=0: expected messages per second"),
        ({"rate": "fast"}, "rate='fast'"),
        ({"limit": 0}, "limit=0: expected a whole number"),
        ({"to": ""}, "a queue's name must not be empty"),
        ({"reason": ""}, "reason='': expected text"),
        ({"header": "tenant"}, "header='tenant': expected a dict"),
        ({"header": {"tenant": 7}}, "header 'tenant': 7: expected"),
        ({"header": {"marq-reason": b"x"}}, "are reserved"),
        ({"older_than": -1}, "older_than=-1: expected seconds"),
        ({"newer_than": datetime(2020, 1, 1)}, "no time zone"),  # noqa: DTZ001
    ],
)
async def test_a_mistake_is_named(backend: Backend, arguments: dict[str, Any], said: str) -> None:
    async with opened(backend) as letters:
        with pytest.raises(ConfigError) as caught:
            await letters.redrive("emails", **arguments)

    assert said in str(caught.value)


async def test_a_filter_that_does_not_exist_is_refused_and_so_is_a_call_before_the_start(backend: Backend) -> None:
    async with opened(backend) as letters:
        with pytest.raises(TypeError, match="'resaon'"):
            await letters.count(resaon="x")  # type: ignore[call-arg]
    with pytest.raises(marq.MarqError, match="the DeadLetters client is stopped"):
        await letters.redrive("emails")


async def test_dead_letters_are_told_apart_by_the_kind_of_their_error(backend: Backend) -> None:
    queue = backend.new_name()
    ids = await kill(backend, queue, b"a", reason="no customer 17 in shop 2")
    ids += await kill(backend, queue, b"b", reason="no customer 4711 in shop 3\nand more")
    await kill(backend, queue, b"c", reason="timeout of 3f2504e0-4f89-41d3-9a0c-0305e82c3301")

    async with opened(backend) as letters:
        kinds = await letters.kinds(queue)
        chosen = await values(letters, queue, kind="no customer N in shop N")
        by_id = await values(letters, queue, id=ids)
        redriven = await letters.redrive(queue, kind="no customer N in shop N")
        left = await letters.kinds(queue)

    assert [(each.kind, each.dead_letters) for each in kinds] == [("no customer N in shop N", 2), ("timeout of N", 1)]
    assert kinds[0].first_dead_lettered_at <= kinds[0].last_dead_lettered_at
    assert chosen == by_id == [b"a", b"b"]
    assert redriven.redriven == 2
    assert [each.kind for each in left] == ["timeout of N"]


@pytest.mark.parametrize("wrong", [{"id": []}, {"id": [1]}, {"kind": 1}])
async def test_ids_and_kinds_of_dead_letters_are_text(backend: Backend, wrong: dict[str, Any]) -> None:
    async with opened(backend) as letters:
        with pytest.raises(ConfigError, match="expected"):
            await letters.kinds(**wrong)


async def test_letters_that_died_after_a_snapshot_are_left_alone(backend: Backend) -> None:
    queue = backend.new_name()
    await kill(backend, queue, b"1", b"2")
    async with opened(backend) as letters:
        asked = await letters.snapshot()
        meant = await letters.delete(queue, dry_run=True, as_of=asked)
        await kill(backend, queue, b"3")

        deleted = await letters.delete(queue, as_of=asked)

        assert (meant.chosen, deleted.deleted) == (2, 2)
        assert await values(letters, queue) == [b"3"]


async def test_a_redrive_to_an_unknown_queue_is_refused_unless_it_is_allowed(backend: Backend) -> None:
    queue = backend.new_name("orders")
    [identity] = await kill(backend, queue, b"x")
    mistyped = queue.replace("orders", "odrers")
    async with opened(backend) as letters:
        for dry_run in (True, False):
            with pytest.raises(marq.UnknownQueue, match=f"Did you mean '{queue}'?") as caught:
                await letters.redrive(queue, to=mistyped, dry_run=dry_run)
            assert (caught.value.queue, caught.value.suggestion) == (mistyped, queue)
        assert await values(letters, queue) == [b"x"]

        assert (await letters.redrive(queue, to=mistyped, allow_unknown=True)).redriven == 1
        async with backend.consumer(mistyped) as consumer:
            message = await take_one(consumer)
            assert message.id == identity
            await message.ack()


async def test_a_queue_is_known_by_each_of_what_it_may_have(backend: Backend) -> None:
    waiting, open_, dead = (backend.new_name(stem) for stem in ("waiting", "open", "dead"))
    defined = await backend.new_queue("defined", max_attempts=3)
    await backend.producer.send(waiting, b"x")
    await backend.producer.send(open_, b"x", delay=600)
    await kill(backend, dead, b"x")

    async with opened(backend) as letters:
        for queue in (defined, waiting, open_, dead):
            await letters.check_known(queue)
        with pytest.raises(marq.UnknownQueue):
            await letters.check_known("nothing like it")
