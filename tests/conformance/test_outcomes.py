"""How a message ends: ack, release, reject; by whom, and how often."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, running, take, take_one


async def test_a_message_with_headers_that_markers_cannot_hold_keeps_no_others_from_delivery(backend: Backend) -> None:
    queue, topic = await backend.new_queue(backoff=[0]), backend.names.messages
    large = {
        b"long name": [("n" * 70_000, b"1"), ("own", b"x")],
        b"many": [("own", b"x"), *((f"h{number}", b"") for number in range(66_000))],
    }
    async with backend.consumer(queue) as consumer:
        for value, headers in large.items():
            await backend.produce(topic, value, queue.encode(), headers)
        await backend.producer.send(queue, b"other")

        for attempt in (1, 2, 3):
            messages = await take(consumer, 3 if attempt == 1 else 2)
            assert {each.value: each.attempt for each in messages if each.value != b"other"} == dict.fromkeys(
                large, attempt
            )
            for message in messages:
                if message.value == b"other" or attempt == 3:
                    await message.ack()
                else:
                    assert message.headers["own"] == b"x"
                    await message.release(0)
    await backend.statistics(queue, acked=3)


async def test_what_is_acked_or_rejected_never_comes_back(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, lease=10) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 5)
        messages = await take(consumer, 5)

        await messages[0].ack()
        await consumer.ack(messages[1])
        await consumer.ack(messages[2:4])
        await messages[4].reject("no good")

        await nothing_comes(backend, consumer)
    await backend.statistics(queue, acked=4, dead_lettered=1, redelivered=0, expired=0)


@pytest.mark.parametrize("error", [RuntimeError("boom"), marq.Retry(delay=600)], ids=["backoff", "delay"])
async def test_a_message_that_fails_its_last_attempt_is_dead_lettered_at_once(
    backend: Backend, error: Exception
) -> None:
    queue = await backend.new_queue(max_attempts=1, backoff=[600])

    async def fail(message: marq.Message) -> None:
        raise error

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(fail)):
        await backend.producer.send(queue, b"x")
        # Long before the delay would be over.
        [letter] = await backend.dead_letters(queue)

    assert letter.attempt == 1


class PanicException(BaseException):
    """What extensions written in Rust raise."""


async def test_a_panic_is_a_failed_attempt_and_the_consumer_goes_on(backend: Backend) -> None:
    queue = await backend.new_queue(max_attempts=2, backoff=[0])

    async def handle(message: marq.Message) -> None:
        if message.value == b"poison":
            raise PanicException("index out of bounds")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"poison")
        [letter] = await backend.dead_letters(queue)
        await backend.producer.send(queue, b"other")
        await backend.statistics(queue, acked=1, dead_lettered=1)

    assert (letter.attempt, letter.error) == (2, "PanicException: index out of bounds")


async def test_outcomes_may_be_told_twice_and_the_first_counts(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 3)
        acked, released, rejected = await take(consumer, 3)

        await acked.ack()
        await acked.ack()
        await acked.release(0)
        await acked.reject("too late")
        await released.release(0)
        await released.reject("too late")
        await released.ack()
        await rejected.reject("no good")
        await rejected.release(0)
        await rejected.ack()
        await consumer.ack([acked, released, rejected])

        again = await take_one(consumer)
        assert again.id == released.id
        await again.ack()
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, acked=2, released=1, rejected=1, dead_lettered=1)


async def test_a_token_finishes_a_message_from_elsewhere(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as here, backend.consumer(backend.new_name("elsewhere")) as there:
        await backend.producer.send_many(queue, [b"x"] * 3)
        messages = await take(here, 3)

        await there.ack(messages[0].token)
        await there.ack(messages[0].token)
        await here.ack(messages[1].token)
        await there.ack([messages[2].token])

        await backend.statistics(queue, acked=3)
        with pytest.raises(ValueError, match="not a message token"):
            await there.ack("token")


async def test_a_released_message_comes_back_as_it_was_with_the_next_attempt(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x", headers={"tenant": b"acme"})
        message = await take_one(consumer)

        await message.release(0)
        again = await take_one(consumer)

        assert (again.id, again.attempt, again.value, again.headers, again.sent_at) == (
            message.id, 2, b"x", {"tenant": b"acme"}, message.sent_at,
        )  # fmt: skip
        assert (again.partition, again.offset) != (message.partition, message.offset)
        assert again.token != message.token
        await again.ack()
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, acked=1, released=1, redelivered=1, expired=0)


async def test_a_release_may_have_a_delay(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"1", b"2"])
        first, second = await take(consumer, 2)
        released_s = backend.now_s()

        await first.release(0.8)
        await second.release(delay=timedelta(milliseconds=400))
        waited_s = {}
        for _ in range(2):
            message = await take_one(consumer)
            waited_s[message.id] = backend.now_s() - released_s
            await message.ack()

        assert waited_s.keys() == {first.id, second.id}
        assert waited_s[first.id] > 0.75
        assert waited_s[second.id] > 0.35


async def test_without_a_delay_a_release_waits_for_the_backoff_of_the_queue(backend: Backend) -> None:
    async with backend.consumer("slow-backoff") as consumer:
        await backend.producer.send("slow-backoff", b"x")
        message = await take_one(consumer)
        released_s = backend.now_s()

        await message.release()
        again = await take_one(consumer)

        assert backend.now_s() - released_s > 1.15
        await again.ack()


async def test_a_rejected_message_becomes_a_dead_letter_with_all_that_is_known(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        sent_id = (await backend.producer.send(queue, b"x", headers={"tenant": b"acme", "empty": None})).id
        await (await take_one(consumer)).release(0)
        message = await take_one(consumer)
        at = f"{backend.names.messages}/{message.partition}/{message.offset}"

        await message.reject("no good")

    [letter] = await backend.dead_letters(queue)
    assert (letter.queue, letter.id, letter.body) == (queue, sent_id, b"x")
    assert letter.headers == {"tenant": b"acme", "empty": None}
    assert (letter.reason, letter.attempt, letter.origin, letter.key) == ("no good", 2, at, None)
    assert letter.sent_at == message.sent_at
    assert letter.dead_lettered_at >= letter.sent_at


async def test_after_its_last_attempt_a_message_becomes_a_dead_letter_with_the_last_error(backend: Backend) -> None:
    async with backend.consumer("two-attempts") as consumer:
        await backend.producer.send("two-attempts", b"x")
        for attempt in (1, 2):
            message = await take_one(consumer)
            assert message.attempt == attempt
            with pytest.raises(LookupError):
                async with message:
                    raise LookupError(f"attempt {attempt}")

    [letter] = await backend.dead_letters("two-attempts")
    assert (letter.attempt, letter.error) == (2, "LookupError: attempt 2")
    assert letter.reason == "2 of 2 attempts used: the last time it was released"
    assert letter.traceback.endswith("LookupError: attempt 2")


async def test_the_last_error_travels_with_the_message(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        first = await take_one(consumer)
        with pytest.raises(LookupError):
            async with first:
                raise LookupError("no such user")
        second = await take_one(consumer)
        await second.release(0)
        third = await take_one(consumer)

        errors = [message.last_error for message in (first, second, third)]
        assert errors == [None, "LookupError: no such user", "LookupError: no such user"]
        assert third.sent_at == first.sent_at
        await third.ack()


async def test_without_a_limit_of_attempts_a_message_is_tried_forever(backend: Backend) -> None:
    queue = await backend.new_queue(max_attempts="unlimited")
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        for attempt in range(1, 9):
            message = await take_one(consumer)
            assert message.attempt == attempt
            await message.release(0)
        await (await take_one(consumer)).ack()

    assert backend.queues[queue].max_attempts == "unlimited"
    await backend.statistics(queue, acked=1, released=8, dead_lettered=0)


async def test_an_interrupted_attempt_is_not_counted_a_hundred_times_in_a_row_and_then_it_is(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        for before in (b"0", b"99", b"100"):
            await backend.produce(
                backend.names.messages, before, queue.encode(), [("marq-attempt", b"3"), ("marq-uncounted", before)]
            )
        for message in await take(consumer, 3):
            with pytest.raises(asyncio.CancelledError):
                async with message:
                    raise asyncio.CancelledError
        again = await take(consumer, 3)

        assert {message.value: message.attempt for message in again} == {b"0": 3, b"99": 3, b"100": 4}
        await consumer.ack(again)
    stored = [each for each in await backend.records(backend.names.messages) if each.key == queue.encode()]
    copies = [(each.value, dict(each.headers)) for each in stored if "marq-id" in dict(each.headers)]
    counts = {value: headers.get("marq-uncounted") for value, headers in copies}
    assert counts == {b"0": b"1", b"99": b"100", b"100": None}


async def test_where_a_queue_wants_no_dead_letters_its_messages_end(backend: Backend) -> None:
    queue = "no-dead-letters"
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"x", b"y"])
        released, rejected = await take(consumer, 2)
        await released.release(0)
        await rejected.reject()

        await backend.statistics(queue, dead_lettered=2)
        await nothing_comes(backend, consumer)
    assert not [each for each in await backend.records(backend.names.dead_letters) if each.key == queue.encode()]


async def test_queued_outcomes_are_written_by_the_stop(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 3)
        one, two, three = await take(consumer, 3)
        await one.ack(wait=False)
        await two.release(0, wait=False)
        await three.reject(wait=False)
    await backend.statistics(queue, acked=1, released=1, dead_lettered=1, redelivered=1)

    async with backend.consumer(queue) as other:
        assert (await take_one(other)).attempt == 2


async def test_words_of_other_queues_are_answered_with_ours(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        message = await take_one(consumer)
        with pytest.raises(TypeError, match=r"release .*reject"):
            message.nack  # noqa: B018
        with pytest.raises(TypeError, match=r"release .*reject"):
            await consumer.nack(message)
        with pytest.raises(TypeError, match="delay"):
            await message.release(countdown=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="delay"):
            await backend.producer.send(queue, b"x", countdown=3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="delay"):
            raise marq.Retry(countdown=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="lease"):
            backend.consumer(queue, visibility_timeout=30)
        with pytest.raises(TypeError, match="max_attempts"):
            backend.consumer(queue, max_retries=3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'leese'"):
            backend.consumer(queue, leese=30)
        with pytest.raises(TypeError, match="max_attempts"):
            await backend.queues.change(queue, max_retries=3)  # type: ignore[call-arg]
        # None of these calls has settled the message.
        await message.ack()
    await backend.statistics(queue, acked=1, released=0)
