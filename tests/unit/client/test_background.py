"""Background tasks of a consumer that end although nothing has stopped them: the consumer ends with an error."""

from __future__ import annotations

import asyncio

import pytest

from marq.wire.errors import BrokerUnavailable, MarqError
from tests.unit.client.fakes import LIMIT_S, Rig, spin

TASKS = ["marq-receiver", "marq-acks"]


def task(name: str) -> asyncio.Task[object]:
    [task] = [each for each in asyncio.all_tasks() if each.get_name() == name]
    return task


async def ended(rig: Rig) -> str:
    """Return the error with which the receiver has ended."""
    async with asyncio.timeout(LIMIT_S):
        while not rig.buffer.closed:
            await rig.buffer.wait()
    assert isinstance(rig.receiver.error, MarqError)
    return str(rig.receiver.error)


@pytest.mark.parametrize("name", TASKS)
async def test_a_receiver_ends_with_an_error_when_user_code_cancels_one_of_its_tasks(make_rig, name) -> None:
    rig = make_rig()
    rig.add(1)
    await rig.take(1)

    task(name).cancel()

    assert await ended(rig) == f"the task {name!r} was cancelled, but not by Marq"


async def test_a_call_that_waits_for_its_outcome_learns_that_the_outcome_is_not_written(make_rig) -> None:
    rig = make_rig()
    rig.add(1)
    [message] = await rig.take(1)
    rig.settler.gate.clear()
    acking = asyncio.create_task(message.ack())
    await spin()

    task("marq-acks").cancel()

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(BrokerUnavailable):
            await acking
