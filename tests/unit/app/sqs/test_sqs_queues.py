"""Queues as SQS clients see them: what a repeated or a later CreateQueue does."""

from __future__ import annotations

import asyncio
import json

import pytest

from marq.queues.queues import Queues
from marq.settings.definitions import layer_key, sqs_key
from marq.settings.queue import UNLIMITED
from marq.wire.errors import BrokerUnavailable
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.limits import MAX_TAGS
from marq_worker.sqs.sqs_queues import DELETED_S, Directory
from tests.unit.app.sqs.conftest import EmptyQueues

MAXIMUM_BYTES = 1_000_000
ARN = "arn:aws:sqs:us-east-1:000000000000:"
REDRIVE = {"RedrivePolicy": json.dumps({"deadLetterTargetArn": f"{ARN}dead", "maxReceiveCount": 3})}
#: Attributes that are settings of Marq, and those in the queue's own record.
MIXED = {"VisibilityTimeout": "0", "DelaySeconds": "5", "MessageRetentionPeriod": "3600", **REDRIVE}
FIFO = {"FifoQueue": "true", "ContentBasedDeduplication": "true", "VisibilityTimeout": "7", "DelaySeconds": "5"}


@pytest.fixture
def directory(queues: Queues) -> Directory:
    return Directory(queues, MAXIMUM_BYTES)


async def test_creating_a_queue_again_with_the_largest_size_changes_nothing(directory: Directory) -> None:
    for _ in range(2):
        await directory.create("emails", {"MaximumMessageSize": "1048576"}, {})

    # Terraform waits until it reads what it set.
    assert directory.get("emails").attributes.maximum_message_bytes == 1_048_576
    with pytest.raises(SqsError, match="another MaximumMessageSize"):
        await directory.create("emails", {"MaximumMessageSize": "1024"}, {})
    for size in ("1048577", "9" * 5_000, "\u00b2"):
        with pytest.raises(SqsError, match="MaximumMessageSize"):
            await directory.create("others", {"MaximumMessageSize": size}, {})


async def test_a_queue_without_a_size_of_its_own_has_what_kafka_accepts(directory: Directory) -> None:
    await directory.create("emails", {}, {})

    await directory.create("emails", {"MaximumMessageSize": "1048576"}, {})

    assert directory.get("emails").attributes.maximum_message_bytes == MAXIMUM_BYTES
    with pytest.raises(SqsError, match="another MaximumMessageSize"):
        await directory.create("emails", {"MaximumMessageSize": str(MAXIMUM_BYTES - 1)}, {})


async def test_a_size_above_what_kafka_accepts_is_reported_as_it_was_set(directory: Directory) -> None:
    await directory.create("emails", {}, {})

    await directory.set_attributes("emails", {"MaximumMessageSize": "1048576"})

    assert directory.get("emails").attributes.to_attributes()["MaximumMessageSize"] == "1048576"


async def test_only_queues_that_clients_created_or_whose_retention_they_set_have_one(
    directory: Directory, queues: Queues
) -> None:
    """SQS's default would end messages of other queues days before Kafka's retention does."""
    await queues.change("defined", lease=60)
    await queues.change("set", lease=60)
    await directory.create("created", {}, {})
    await directory.set_attributes("defined", {"ReceiveMessageWaitTimeSeconds": "1"})
    await directory.set_attributes("set", {"MessageRetentionPeriod": "60"})

    names = ("defined", "set", "created")
    assert [directory.get(name).attributes.retention_s for name in names] == [None, 60, 345_600]
    assert "MessageRetentionPeriod" not in directory.get("defined").attributes.to_attributes()


async def test_a_retention_period_is_not_compared_with_that_of_a_queue_that_only_marq_defined(
    directory: Directory, queues: Queues
) -> None:
    await queues.change("defined", lease=60)
    await directory.create("created", {}, {})

    await directory.create("defined", {"MessageRetentionPeriod": "345600", "VisibilityTimeout": "60"}, {})

    assert directory.get("defined").attributes.retention_s is None
    for name, other in ("defined", "VisibilityTimeout"), ("created", "MessageRetentionPeriod"):
        with pytest.raises(SqsError, match=f"another {other}"):
            await directory.create(name, {"MessageRetentionPeriod": "60", "VisibilityTimeout": "70"}, {})
    with pytest.raises(SqsError, match="expected 60 to"):
        await directory.create("defined", {"MessageRetentionPeriod": "59"}, {})


async def test_a_queue_with_the_name_of_a_deleted_one_is_told_from_it(queues: Queues) -> None:
    now_s = 1_700_000_000.0
    directory = Directory(queues, MAXIMUM_BYTES, lambda: now_s)
    fifo = {"FifoQueue": "true"}
    await directory.create("orders.fifo", fifo, {})
    generations = [directory.get("orders.fifo").generation]
    for _ in range(2):
        await directory.forget("orders.fifo", now_s)
        now_s += DELETED_S
        await directory.create("orders.fifo", fifo, {})
        generations.append(directory.get("orders.fifo").generation)
        await directory.tag("orders.fifo", {"a": "b"})
        assert directory.get("orders.fifo").generation == generations[-1]

    assert generations == [0, 1_700_000_060, 1_700_000_120]


@pytest.mark.parametrize(("ahead_s", "refused"), [(0.6, True), (3_600, False)])
async def test_a_deletion_by_a_clock_that_is_far_ahead_does_not_keep_the_name(
    queues: Queues, ahead_s: float, refused: bool
) -> None:
    now_s = 1_700_000_000.0
    directory = Directory(queues, MAXIMUM_BYTES, lambda: now_s)
    await directory.create("emails", {}, {})
    await directory.forget("emails", now_s + ahead_s)

    if refused:
        with pytest.raises(SqsError, match="wait 60 s"):
            await directory.create("emails", {}, {})
    else:
        await directory.create("emails", {}, {})
    assert directory.exists("emails") is not refused


async def test_a_fifo_queue_with_its_own_topic_is_refused_as_a_dead_letter_queue(
    directory: Directory, queues: Queues
) -> None:
    """Nothing can be moved there, so a failing message would block its group for days."""
    await queues.change("dead.fifo", ordering="key", topic="letters")
    policy = json.dumps({"deadLetterTargetArn": f"{ARN}dead.fifo", "maxReceiveCount": 3})

    with pytest.raises(SqsError, match="its own topic 'letters'") as caught:
        await directory.create("orders.fifo", {"FifoQueue": "true", "RedrivePolicy": policy}, {})

    assert caught.value.shape == "InvalidParameterValue"


@pytest.mark.parametrize(("name", "attributes"), [("emails", MIXED), ("orders.fifo", FIFO)])
async def test_a_queue_that_another_client_is_creating_has_its_attributes_as_soon_as_it_exists(
    directory: Directory, queues: Queues, name: str, attributes: dict[str, str]
) -> None:
    await directory.create("dead", {}, {})
    exists = asyncio.Event()
    queues.listen(lambda: exists.set() if directory.exists(name) else None)
    creating = asyncio.create_task(directory.create(name, attributes, {"a": "b"}))
    async with asyncio.timeout(10):
        await exists.wait()

    await directory.create(name, attributes, {"a": "b"})
    await creating

    assert directory.get(name).tags == {"a": "b"}
    assert queues[name].max_attempts == UNLIMITED


@pytest.mark.parametrize("refused", [sqs_key("emails"), layer_key("change", "emails")])
async def test_a_creation_that_failed_can_be_repeated(
    directory: Directory, queues: Queues, log: EmptyQueues, refused: bytes
) -> None:
    await directory.create("dead", {}, {})
    log.refused = refused

    with pytest.raises(BrokerUnavailable):
        await directory.create("emails", MIXED, {"a": "b"})
    await directory.create("emails", MIXED, {"a": "b"})

    queue = directory.get("emails")
    assert (queue.attributes.dead_letter_queue, queue.attributes.retention_s, queue.tags) == ("dead", 3_600, {"a": "b"})
    assert queues["emails"].max_attempts == UNLIMITED


@pytest.mark.parametrize(("name", "settings"), [("emails", {"lease": 9}), ("orders.fifo", {"ordering": "key"})])
async def test_a_queue_that_another_client_created_with_other_attributes_a_moment_before_is_kept(
    directory: Directory, queues: Queues, log: EmptyQueues, name: str, settings: dict[str, object]
) -> None:
    other = {"attributes": {}, "tags": {}, "created": 1, "modified": 1}

    def create_first() -> None:
        log.before_write = lambda: None
        log.append(sqs_key(name), other)
        log.append(layer_key("change", name), settings)

    log.before_write = create_first
    attributes = {"VisibilityTimeout": "7"} | ({"FifoQueue": "true"} if name.endswith(".fifo") else {})
    with pytest.raises(SqsError, match="exists with another VisibilityTimeout"):
        await directory.create(name, attributes, {})

    assert queues.definitions.sqs(name) == other
    assert queues.definitions.layer("change", name) == settings


async def test_of_simultaneous_creations_with_different_attributes_one_succeeds(directory: Directory) -> None:

    outcomes = await asyncio.gather(
        *[directory.create("emails", {"VisibilityTimeout": str(seconds)}, {}) for seconds in (10, 20, 30)],
        return_exceptions=True,
    )

    assert [getattr(outcome, "shape", None) for outcome in outcomes] == [None, "QueueNameExists", "QueueNameExists"]
    assert directory.get("emails").attributes.visibility_timeout_s == 10


async def test_a_queue_has_at_most_fifty_tags(directory: Directory) -> None:
    await directory.create("emails", {}, {f"{number}": "" for number in range(MAX_TAGS - 1)})
    await directory.tag("emails", {"last": "", "1": "changed"})

    with pytest.raises(SqsError, match="at most 50"):
        await directory.tag("emails", {"one-more": ""})

    assert len(directory.get("emails").tags) == MAX_TAGS


class OtherEndpoint:
    """Creates queues that :class:`Directory` does not know before it reads the log to its end."""

    def __init__(self, queues: Queues, log: EmptyQueues, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.created: list[str] = []
        self._log = log
        self._sync = queues.sync
        monkeypatch.setattr(queues, "sync", self.sync)

    async def sync(self, limit_s: float) -> None:
        self.reads += 1
        for name in self.created:
            self._log.append(sqs_key(name), {"created": 1, "modified": 1})
        self.created = []
        await self._sync(limit_s)


@pytest.fixture
def other(queues: Queues, log: EmptyQueues, monkeypatch: pytest.MonkeyPatch) -> OtherEndpoint:
    return OtherEndpoint(queues, log, monkeypatch)


async def test_queues_of_another_endpoint_are_found_by_the_first_call(
    directory: Directory, other: OtherEndpoint
) -> None:
    for name in ("a", "b"):
        other.created = [name]
        await directory.look_for(name)
        assert directory.exists(name)


async def test_calls_for_unknown_queues_look_together(directory: Directory, other: OtherEndpoint) -> None:

    await asyncio.gather(*[directory.look_for(f"missing-{number}") for number in range(100)])

    assert other.reads == 1


async def test_a_dead_letter_queue_of_another_endpoint_is_found(directory: Directory, other: OtherEndpoint) -> None:
    other.created = ["dead"]
    await directory.create("emails", REDRIVE, {})
    await directory.create("bills", {}, {})
    other.created = ["dead-too"]
    policy = REDRIVE["RedrivePolicy"].replace(":dead", ":dead-too")
    await directory.set_attributes("bills", {"RedrivePolicy": policy})

    names = [directory.get(name).attributes.dead_letter_queue for name in ("emails", "bills")]
    assert names == ["dead", "dead-too"]


@pytest.mark.parametrize(
    ("policy", "sources"),
    [
        ({"redrivePermission": "allowAll"}, {"emails", "bills"}),
        ({"redrivePermission": "denyAll"}, set()),
        ({"redrivePermission": "byQueue", "sourceQueueArns": [f"{ARN}emails"]}, {"emails"}),
    ],
)
async def test_a_queue_takes_dead_letters_only_of_queues_that_its_policy_allows(
    directory: Directory, policy: dict[str, object], sources: set[str]
) -> None:
    await directory.create("dead", {"RedriveAllowPolicy": json.dumps(policy)}, {})
    for name in ("emails", "bills"):
        if name in sources:
            await directory.create(name, REDRIVE, {})
            continue
        with pytest.raises(SqsError, match=f"refuses dead letters of '{name}'") as caught:
            await directory.create(name, REDRIVE, {})
        assert caught.value.shape == "InvalidParameterValue"
        await directory.create(name, {}, {})
        with pytest.raises(SqsError, match="refuses"):
            await directory.set_attributes(name, REDRIVE)

    assert set(directory.sources_of("dead")) == sources
