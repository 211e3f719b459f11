"""Attributes of queues: what clients may set, and what they read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq_worker.sqs.arns import queue_of_arn
from marq_worker.sqs.attributes import (
    NAMES,
    QueueAttributes,
    differing_attribute,
    read_attributes,
)
from marq_worker.sqs.errors import SqsError

DEAD = "arn:aws:sqs:us-east-1:000000000000:dead"
SOURCE = "arn:aws:sqs:us-east-1:000000000000:orders"


def policy(**members: Any) -> str:
    return json.dumps(members)


def refused(attributes: dict[str, str], *, fifo: bool = False) -> SqsError:
    with pytest.raises(SqsError) as caught:
        read_attributes(attributes, fifo=fifo)
    return caught.value


def test_a_new_queue_has_the_defaults_of_sqs() -> None:
    assert read_attributes({}, fifo=False).to_attributes() == {
        "VisibilityTimeout": "30",
        "DelaySeconds": "0",
        "MessageRetentionPeriod": "345600",
        "ReceiveMessageWaitTimeSeconds": "0",
        "MaximumMessageSize": "1048576",
        "SqsManagedSseEnabled": "true",
    }


def test_every_attribute_is_read() -> None:
    attributes = {
        "VisibilityTimeout": "0",
        "DelaySeconds": "900",
        "MessageRetentionPeriod": "60",
        "ReceiveMessageWaitTimeSeconds": "20",
        "MaximumMessageSize": "1024",
        "SqsManagedSseEnabled": "false",
        "RedrivePolicy": policy(deadLetterTargetArn=DEAD, maxReceiveCount=5),
        "RedriveAllowPolicy": policy(redrivePermission="byQueue", sourceQueueArns=[SOURCE]),
        "FifoQueue": "true",
        "ContentBasedDeduplication": "true",
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
        "Policy": "",
        "KmsMasterKeyId": "",
    }

    assert read_attributes(attributes, fifo=True) == QueueAttributes(
        visibility_timeout_s=0,
        delay_s=900,
        retention_s=60,
        wait_s=20,
        maximum_message_bytes=1_024,
        sqs_managed_sse=False,
        dead_letter_queue="dead",
        max_receive_count=5,
        redrive_allow_policy=attributes["RedriveAllowPolicy"],
        fifo=True,
        content_based_deduplication=True,
        fifo_throughput_limit="perMessageGroupId",
    )


QUEUES = st.builds(
    QueueAttributes,
    visibility_timeout_s=st.integers(0, 43_200),
    delay_s=st.integers(0, 900),
    retention_s=st.integers(60, 1_209_600),
    wait_s=st.integers(0, 20),
    maximum_message_bytes=st.integers(1_024, 1_048_576),
    redrive_allow_policy=st.sampled_from(
        [None, policy(redrivePermission="allowAll"), policy(redrivePermission="denyAll")]
    ),
    sqs_managed_sse=st.booleans(),
) | st.builds(
    QueueAttributes,
    dead_letter_queue=st.just("dead.fifo"),
    dead_letter_arn=st.sampled_from(["arn:aws:sqs:us-east-1:000000000000:dead.fifo", "arn:aws:sqs:r:0:dead.fifo"]),
    max_receive_count=st.integers(1, 1_000),
    fifo=st.just(True),
    content_based_deduplication=st.booleans(),
    fifo_throughput_limit=st.sampled_from(["perQueue", "perMessageGroupId"]),
)


@given(QUEUES)
def test_attributes_are_written_as_they_are_read(queue: QueueAttributes) -> None:
    attributes = queue.to_attributes()

    read = read_attributes(attributes, fifo=queue.fifo)
    assert (read, read.dead_letter_arn) == (queue, queue.dead_letter_arn)
    assert set(attributes) <= NAMES
    assert differing_attribute(attributes, queue) is None


@pytest.mark.parametrize("arn", [DEAD, "arn:aws:sqs:eu-west-1:123456789012:dead"])
def test_the_written_redrive_policy_has_the_arn_that_the_client_sent_and_the_count(arn: str) -> None:
    attributes = {"RedrivePolicy": policy(maxReceiveCount="3", deadLetterTargetArn=arn)}

    written = read_attributes(attributes, fifo=False).to_attributes()["RedrivePolicy"]

    assert json.loads(written) == {"deadLetterTargetArn": arn, "maxReceiveCount": 3}


def test_setting_attributes_keeps_the_others() -> None:
    current = QueueAttributes(delay_s=5, dead_letter_queue="dead", max_receive_count=3, redrive_allow_policy="{}")

    changed = read_attributes({"VisibilityTimeout": "60"}, fifo=False, current=current)

    assert changed == QueueAttributes(
        visibility_timeout_s=60,
        delay_s=5,
        dead_letter_queue="dead",
        max_receive_count=3,
        redrive_allow_policy="{}",
    )
    removed = read_attributes({"RedrivePolicy": "", "RedriveAllowPolicy": ""}, fifo=False, current=changed)
    assert removed == QueueAttributes(visibility_timeout_s=60, delay_s=5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("VisibilityTimeout", ["-1", "43201", "", "1.0", "+1", "\u0661", " 1", "1e2", "9" * 5_000, "true"]),
        ("DelaySeconds", ["-1", "901"]),
        ("MessageRetentionPeriod", ["59", "1209601"]),
        ("ReceiveMessageWaitTimeSeconds", ["-1", "21"]),
        ("MaximumMessageSize", ["1023", "1048577"]),
        ("SqsManagedSseEnabled", ["", "1", "yes"]),
    ],
)
def test_values_out_of_range_are_refused(name: str, values: list[str]) -> None:
    for value in values:
        error = refused({name: value})
        assert error.shape == "InvalidAttributeValue", value
        assert error.message.startswith(f"{name}: expected ")


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"DeduplicationScope": "group"}, "DeduplicationScope: expected queue or messageGroup"),
        ({"FifoThroughputLimit": "none"}, "FifoThroughputLimit: expected perQueue or perMessageGroupId"),
        ({"ContentBasedDeduplication": "1"}, "ContentBasedDeduplication: expected true or false"),
        ({"FifoQueue": "false"}, "FifoQueue: expected true"),
    ],
)
def test_values_of_fifo_queues_are_checked(attributes: dict[str, str], text: str) -> None:
    error = refused(attributes, fifo=True)

    assert error.shape == "InvalidAttributeValue"
    assert text in error.message


def test_deduplication_ids_of_a_fifo_queue_are_those_of_a_group() -> None:
    assert read_attributes({}, fifo=True).to_attributes()["DeduplicationScope"] == "messageGroup"
    error = refused({"DeduplicationScope": "queue"}, fifo=True)
    assert error.shape == "UnsupportedOperation"
    assert "leave the attribute out" in error.message


@pytest.mark.parametrize(
    "value",
    [
        "dead",
        "[]",
        "{}",
        "[" * 100_000,
        policy(deadLetterTargetArn=DEAD),
        policy(maxReceiveCount=3),
        policy(deadLetterTargetArn=DEAD, maxReceiveCount=0),
        policy(deadLetterTargetArn=DEAD, maxReceiveCount=1_001),
        policy(deadLetterTargetArn=DEAD, maxReceiveCount=1.5),
        policy(deadLetterTargetArn=DEAD, maxReceiveCount=True),
        policy(deadLetterTargetArn=DEAD, maxReceiveCount=None),
        policy(deadLetterTargetArn=DEAD, maxReceiveCount=3, other=1),
        policy(deadLetterTargetArn=7, maxReceiveCount=3),
        policy(deadLetterTargetArn="dead", maxReceiveCount=3),
    ],
)
def test_a_redrive_policy_of_another_form_is_refused(value: str) -> None:
    assert refused({"RedrivePolicy": value}).shape == "InvalidParameterValue"


@pytest.mark.parametrize(
    "value",
    [
        "all",
        "{}",
        policy(redrivePermission="some"),
        policy(redrivePermission="byQueue"),
        policy(redrivePermission="byQueue", sourceQueueArns=[]),
        policy(redrivePermission="byQueue", sourceQueueArns=[SOURCE] * 11),
        policy(redrivePermission="byQueue", sourceQueueArns=["orders"]),
        policy(redrivePermission="byQueue", sourceQueueArns=[1]),
        policy(redrivePermission="allowAll", sourceQueueArns=[SOURCE]),
    ],
)
def test_a_redrive_allow_policy_of_another_form_is_refused(value: str) -> None:
    assert refused({"RedriveAllowPolicy": value}).shape == "InvalidParameterValue"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("QueueArn", "can't be set"),
        ("ApproximateNumberOfMessages", "can't be set"),
        ("All", "can't be set"),
        ("Visibility", "is not an attribute of queues"),
        ("", "is not an attribute of queues"),
        ("FifoQueue", "only for FIFO queues"),
        ("ContentBasedDeduplication", "only for FIFO queues"),
        ("DeduplicationScope", "only for FIFO queues"),
    ],
)
def test_names_that_cannot_be_set_are_refused(name: str, text: str) -> None:
    error = refused({name: "true"})

    assert error.shape == "InvalidAttributeName"
    assert text in error.message


@pytest.mark.parametrize("name", ["Policy", "KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds"])
def test_an_attribute_that_marq_would_not_honour_is_refused_by_name(name: str) -> None:
    error = refused({name: "300"})

    assert error.shape == "UnsupportedOperation"
    assert name in error.message
    assert read_attributes({name: ""}, fifo=False) == QueueAttributes()


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({}, None),
        ({"VisibilityTimeout": "1800"}, None),
        ({"VisibilityTimeout": "1800", "DelaySeconds": "0"}, None),
        ({"RedrivePolicy": policy(maxReceiveCount="3", deadLetterTargetArn=DEAD)}, None),
        # The region and the account of an ARN make no difference.
        ({"RedrivePolicy": policy(maxReceiveCount=3, deadLetterTargetArn="arn:aws:sqs:eu-west-1:1:dead")}, None),
        ({"VisibilityTimeout": "30"}, "VisibilityTimeout"),
        ({"VisibilityTimeout": "1800", "DelaySeconds": "1"}, "DelaySeconds"),
        ({"RedrivePolicy": policy(maxReceiveCount=4, deadLetterTargetArn=DEAD)}, "RedrivePolicy"),
        ({"RedrivePolicy": ""}, "RedrivePolicy"),
    ],
)
def test_creating_a_queue_again_compares_the_attributes_that_the_call_names(
    attributes: dict[str, str], name: str | None
) -> None:
    existing = QueueAttributes(
        visibility_timeout_s=1_800, wait_s=7, dead_letter_queue="dead", dead_letter_arn=DEAD, max_receive_count=3
    )

    assert differing_attribute(attributes, existing) == name


def test_names_are_those_of_the_model() -> None:
    from botocore.loaders import Loader

    model = Loader().load_service_model("sqs", "service-2")

    assert set(model["shapes"]["QueueAttributeName"]["enum"]) == NAMES


@pytest.mark.parametrize("text", ["", "dead", "arn:aws:sqs:r:0:", "arn:aws:sns:r:0:dead", f"{DEAD}:x", "a:b:c:d:e:f"])
def test_an_arn_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(SqsError, match="expected arn:aws:sqs:REGION:ACCOUNT:QUEUE"):
        queue_of_arn(text)
    assert queue_of_arn(DEAD) == "dead"
