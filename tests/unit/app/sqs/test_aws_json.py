"""What requests mean, and what clients read in answers: boto3 is at the other end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from botocore.parsers import QueryParser
from hypothesis import given
from hypothesis import strategies as st

from marq.wire.errors import ConfigError
from marq_worker.sqs import aws_json
from marq_worker.sqs.aws_json import CONTENT_TYPE, Call, answer, operations, query_refusal, read_call, refusal
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.limits import check
from tests.unit.app.sqs.caught import QUEUE_URL, Caught

TEXT = 'grüße \u2028 🎉 \t"quoted" \\ </x>'
ATTRIBUTES = {
    "trace": {"DataType": "String", "StringValue": TEXT},
    "blob": {"DataType": "Binary.png", "BinaryValue": bytes(range(256))},
    "count": {"DataType": "Number.int", "StringValue": "-17"},
}
#: An operation's parameters, with every member of its input.
FULL_CALLS: dict[str, dict[str, Any]] = {
    "AddPermission": {"QueueUrl": QUEUE_URL, "Label": "l", "AWSAccountIds": ["1", "2"], "Actions": ["SendMessage"]},
    "CancelMessageMoveTask": {"TaskHandle": "task"},
    "ChangeMessageVisibility": {"QueueUrl": QUEUE_URL, "ReceiptHandle": "h", "VisibilityTimeout": 0},
    "ChangeMessageVisibilityBatch": {
        "QueueUrl": QUEUE_URL,
        "Entries": [{"Id": "a", "ReceiptHandle": "h", "VisibilityTimeout": 43_200}],
    },
    "CreateQueue": {"QueueName": "orders", "Attributes": {"DelaySeconds": "5"}, "tags": {"team": TEXT}},
    "DeleteMessage": {"QueueUrl": QUEUE_URL, "ReceiptHandle": "h"},
    "DeleteMessageBatch": {"QueueUrl": QUEUE_URL, "Entries": [{"Id": "a", "ReceiptHandle": "h"}]},
    "DeleteQueue": {"QueueUrl": QUEUE_URL},
    "GetQueueAttributes": {"QueueUrl": QUEUE_URL, "AttributeNames": ["All"]},
    "GetQueueUrl": {"QueueName": "orders", "QueueOwnerAWSAccountId": "000000000000"},
    "ListDeadLetterSourceQueues": {"QueueUrl": QUEUE_URL, "NextToken": "n", "MaxResults": 1_000},
    "ListMessageMoveTasks": {"SourceArn": "arn:aws:sqs:us-east-1:000000000000:dead", "MaxResults": 10},
    "ListQueueTags": {"QueueUrl": QUEUE_URL},
    "ListQueues": {"QueueNamePrefix": "", "NextToken": "n", "MaxResults": 1},
    "PurgeQueue": {"QueueUrl": QUEUE_URL},
    "ReceiveMessage": {
        "QueueUrl": QUEUE_URL,
        "AttributeNames": ["All"],
        "MessageSystemAttributeNames": ["SentTimestamp"],
        "MessageAttributeNames": ["bar.*"],
        "MaxNumberOfMessages": 10,
        "VisibilityTimeout": 30,
        "WaitTimeSeconds": 20,
        "ReceiveRequestAttemptId": "try-1",
    },
    "RemovePermission": {"QueueUrl": QUEUE_URL, "Label": "l"},
    "SendMessage": {
        "QueueUrl": QUEUE_URL,
        "MessageBody": TEXT,
        "DelaySeconds": 0,
        "MessageAttributes": ATTRIBUTES,
        "MessageSystemAttributes": {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1"}},
        "MessageDeduplicationId": "d",
        "MessageGroupId": "g",
    },
    "SendMessageBatch": {
        "QueueUrl": QUEUE_URL,
        "Entries": [
            {"Id": "a", "MessageBody": TEXT, "DelaySeconds": 900, "MessageAttributes": ATTRIBUTES},
            {"Id": "b", "MessageBody": "x", "MessageDeduplicationId": "d", "MessageGroupId": "g"},
        ],
    },
    "SetQueueAttributes": {"QueueUrl": QUEUE_URL, "Attributes": {"VisibilityTimeout": "30"}},
    "StartMessageMoveTask": {
        "SourceArn": "arn:aws:sqs:us-east-1:000000000000:dead",
        "DestinationArn": "arn:aws:sqs:us-east-1:000000000000:orders",
        "MaxNumberOfMessagesPerSecond": 500,
    },
    "TagQueue": {"QueueUrl": QUEUE_URL, "Tags": {"team": "shop"}},
    "UntagQueue": {"QueueUrl": QUEUE_URL, "TagKeys": ["team"]},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def read(body: object, operation: str = "SendMessage") -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_call(f"AmazonSQS.{operation}", CONTENT_TYPE, data)


def refused(body: object, operation: str = "SendMessage") -> tuple[str, str]:
    with pytest.raises(SqsError) as caught:
        read(body, operation)
    return caught.value.shape, caught.value.message


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", FULL_CALLS)
def test_a_call_of_boto3_is_read_as_it_was_made(operation: str, session: Any, client: Any, caught: Caught) -> None:
    methods = {name: method for method, name in client.meta.method_to_api_mapping.items()}

    getattr(client, methods[operation])(**FULL_CALLS[operation])

    headers = caught.request.headers
    target, content_type = (headers[name].decode() for name in ("X-Amz-Target", "Content-Type"))
    assert read_call(target, content_type, caught.request.body) == Call(operation, FULL_CALLS[operation])


def test_every_operation_and_member_of_the_model_is_among_these_calls(client: Any) -> None:
    model = client.meta.service_model
    members = {name: set(model.operation_model(name).input_shape.members) for name in model.operation_names}

    assert operations() == set(FULL_CALLS)
    assert {name: set(parameters) for name, parameters in FULL_CALLS.items()} == members


def test_members_that_newer_clients_send_and_null_are_dropped() -> None:
    attribute = {"DataType": "String", "StringValue": "v", "BinaryValue": None, "Later": 1}

    call = read(
        {
            "QueueUrl": QUEUE_URL,
            "MessageBody": "hello",
            "DelaySeconds": None,
            "Later": {"a": [1]},
            "MessageAttributes": {"a": attribute, "b": None},
        }
    )

    assert call.parameters == {
        "QueueUrl": QUEUE_URL,
        "MessageBody": "hello",
        "MessageAttributes": {"a": {"DataType": "String", "StringValue": "v"}},
    }


def test_an_empty_body_is_a_call_without_parameters() -> None:
    assert read(b"", "ListQueues") == Call("ListQueues", {})


@pytest.mark.parametrize("content_type", ["application/x-amz-json-1.0; charset=utf-8", "Application/JSON"])
def test_content_types_may_have_parameters_and_capitals(content_type: str) -> None:
    assert read_call("AmazonSQS.ListQueues", content_type, b"{}").operation == "ListQueues"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "the body is not valid JSON"),
        (b'{"QueueUrl": "\xff"}', "the body is not valid JSON in UTF-8"),
        ('{"QueueUrl": "x"}'.encode("utf-16"), "the body is not valid JSON in UTF-8"),
        (b"[" * 100_000, "the body is not valid JSON"),
        (b'{"DelaySeconds": ' + b"9" * 5_000 + b"}", "the body is not valid JSON"),
        ([], "the body: expected an object"),
        (None, "the body: expected an object"),
        ({"MessageBody": 1}, "MessageBody: expected text"),
        (b'{"MessageBody": "\\ud800"}', "MessageBody: expected text without lone surrogates"),
        ({"DelaySeconds": "1"}, "DelaySeconds: expected an integer"),
        ({"DelaySeconds": True}, "DelaySeconds: expected an integer"),
        ({"DelaySeconds": 1.0}, "DelaySeconds: expected an integer"),
        ({"DelaySeconds": 2**31}, "DelaySeconds: expected an integer"),
        ({"MessageAttributes": []}, "MessageAttributes: expected an object"),
        ({"MessageAttributes": {"a": "v"}}, "MessageAttributes: expected an object"),
        ({"MessageAttributes": {"a": {"BinaryValue": "?"}}}, "MessageAttributes.BinaryValue: expected base64"),
        ({"MessageAttributes": {"a": {"BinaryValue": "ä"}}}, "MessageAttributes.BinaryValue: expected base64"),
        ({"MessageAttributes": {"a": {"BinaryListValues": "AA=="}}}, "expected a list"),
    ],
)
def test_a_body_of_another_form_is_refused_with_the_member_and_its_type(body: object, text: str) -> None:
    shape, message = refused(body)

    assert shape == "SerializationException"
    assert text in message


@pytest.mark.parametrize(
    ("operation", "body", "member"),
    [
        ("SendMessage", {"QueueUrl": "u"}, "MessageBody"),
        ("SendMessage", {"QueueUrl": "u", "MessageBody": None}, "MessageBody"),
        ("SendMessage", {"QueueUrl": "u", "MessageBody": "b", "MessageAttributes": {"a": {}}}, "DataType"),
        ("SendMessageBatch", {"QueueUrl": "u", "Entries": [{"Id": "a"}]}, "MessageBody"),
        ("CreateQueue", {}, "QueueName"),
    ],
)
def test_a_missing_member_is_named(operation: str, body: object, member: str) -> None:
    assert refused(body, operation) == ("MissingParameter", f"the request has no {member}; add it")


@pytest.mark.parametrize("target", [None, "", "AmazonSQS", "AmazonSQS.", "AmazonSQS.Nothing", "SQS.SendMessage"])
def test_another_target_is_an_unknown_operation(target: str | None) -> None:
    with pytest.raises(SqsError, match=r"AmazonSQS\.OPERATION") as caught:
        read_call(target, CONTENT_TYPE, b"{}")

    assert (caught.value.shape, caught.value.code) == ("UnknownOperationException", "InvalidAction")


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_content_type_is_not_read(content_type: str | None) -> None:
    with pytest.raises(SqsError, match=r"expected Content-Type: application/x-amz-json-1\.0"):
        read_call("AmazonSQS.ListQueues", content_type, b"{}")


@given(operation=st.sampled_from(sorted(FULL_CALLS)), member=st.data(), value=JSON)
def test_no_value_of_a_member_can_raise_anything_but_an_error_of_sqs(
    operation: str, member: st.DataObject, value: object
) -> None:
    name = member.draw(st.sampled_from(sorted(FULL_CALLS[operation])))

    outcome = read_and_checked(answer({**FULL_CALLS[operation], name: value}), operation)

    assert outcome == operation or (isinstance(outcome, SqsError) and outcome.message and outcome.status == 400)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_body_can_raise_anything_but_an_error_of_sqs(body: bytes) -> None:
    outcome = read_and_checked(body, "ListQueues")

    assert outcome == "ListQueues" or (isinstance(outcome, SqsError) and outcome.shape == "SerializationException")


def read_and_checked(body: bytes, operation: str) -> str | SqsError:
    try:
        call = read(body, operation)
        check(call)
    except SqsError as error:
        return error
    return call.operation


# --- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_what_boto3_returns(client: Any, caught: Caught) -> None:
    message = {
        "MessageId": "00000000-d25d-88e7-8000-000000000011",
        "ReceiptHandle": "h",
        "MD5OfBody": "0" * 32,
        "Body": TEXT,
        "Attributes": {"ApproximateReceiveCount": "1"},
        "MD5OfMessageAttributes": "1" * 32,
        "MessageAttributes": ATTRIBUTES,
    }
    caught.answer = (200, {"Content-Type": CONTENT_TYPE}, answer({"Messages": [message]}))

    result = client.receive_message(QueueUrl=QUEUE_URL, WaitTimeSeconds=0)

    assert result["Messages"] == [message]


def test_an_answer_with_a_value_that_json_lacks_is_a_mistake_of_the_endpoint() -> None:
    with pytest.raises(TypeError, match="a value of type set"):
        answer({"Messages": {1}})


@pytest.mark.parametrize(
    ("shape", "code", "status"),
    [
        ("QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue", 400),
        ("QueueNameExists", "QueueAlreadyExists", 400),
        ("BatchEntryIdsNotDistinct", "AWS.SimpleQueueService.BatchEntryIdsNotDistinct", 400),
        ("BatchRequestTooLong", "AWS.SimpleQueueService.BatchRequestTooLong", 400),
        ("EmptyBatchRequest", "AWS.SimpleQueueService.EmptyBatchRequest", 400),
        ("InvalidBatchEntryId", "AWS.SimpleQueueService.InvalidBatchEntryId", 400),
        ("TooManyEntriesInBatchRequest", "AWS.SimpleQueueService.TooManyEntriesInBatchRequest", 400),
        ("MessageNotInflight", "AWS.SimpleQueueService.MessageNotInflight", 400),
        ("QueueDeletedRecently", "AWS.SimpleQueueService.QueueDeletedRecently", 400),
        ("UnsupportedOperation", "AWS.SimpleQueueService.UnsupportedOperation", 400),
        ("PurgeQueueInProgress", "AWS.SimpleQueueService.PurgeQueueInProgress", 403),
        ("OverLimit", "OverLimit", 403),
        ("ResourceNotFoundException", "ResourceNotFoundException", 404),
        ("InvalidAttributeName", "InvalidAttributeName", 400),
        ("InvalidAttributeValue", "InvalidAttributeValue", 400),
        ("InvalidIdFormat", "InvalidIdFormat", 400),
        ("InvalidMessageContents", "InvalidMessageContents", 400),
        ("ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid", 400),
    ],
)
def test_boto3_raises_the_exception_of_a_refusal_with_its_older_code(
    client: Any, caught: Caught, shape: str, code: str, status: int
) -> None:
    caught.answer = refusal(SqsError(shape, TEXT))

    with pytest.raises(client.exceptions.from_code(code)) as raised:
        client.purge_queue(QueueUrl=QUEUE_URL)

    # For codes that it does not know, boto3 returns ClientError itself.
    assert type(raised.value) is not ClientError
    assert type(raised.value).__name__ == shape
    assert raised.value.response["Error"] == {"Code": code, "Message": TEXT, "QueryErrorCode": shape, "Type": "Sender"}
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


@pytest.mark.parametrize(
    ("shape", "status", "fault"),
    [
        ("InvalidParameterValue", 400, "Sender"),
        ("MissingParameter", 400, "Sender"),
        ("AccessDenied", 403, "Sender"),
        ("InvalidClientTokenId", 403, "Sender"),
        ("SignatureDoesNotMatch", 403, "Sender"),
        ("MissingAuthenticationToken", 403, "Sender"),
        ("IncompleteSignature", 400, "Sender"),
        ("InternalFailure", 500, "Receiver"),
        ("ServiceUnavailable", 503, "Receiver"),
    ],
)
def test_errors_that_the_model_lacks_reach_boto3_with_code_status_and_fault(
    client: Any, caught: Caught, shape: str, status: int, fault: str
) -> None:
    caught.answer = refusal(SqsError(shape, "because"))

    with pytest.raises(ClientError) as raised:
        client.purge_queue(QueueUrl=QUEUE_URL)

    error = raised.value.response["Error"]
    assert (error["Code"], error["Message"], error["Type"]) == (shape, "because", fault)
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


def test_clients_of_the_query_protocol_read_their_refusal() -> None:
    status, headers, body = query_refusal("id-<1>")

    parsed = QueryParser().parse({"status_code": status, "headers": headers, "body": body}, None)

    assert status == 400
    assert parsed["Error"]["Code"] == "AWS.SimpleQueueService.UnsupportedOperation"
    assert "application/x-amz-json-1.0" in parsed["Error"]["Message"]
    assert parsed["ResponseMetadata"]["RequestId"] == "id-<1>"


@pytest.mark.parametrize(
    ("content_type", "url_query", "wants"),
    [
        ("application/x-www-form-urlencoded; charset=utf-8", {}, True),
        ("Application/X-WWW-Form-Urlencoded", {}, True),
        (None, {"Action": "ListQueues"}, True),
        (CONTENT_TYPE, {"other": "x"}, False),
        (None, {}, False),
    ],
)
def test_the_query_protocol_is_known_by_its_content_type_or_by_the_action_in_the_url(
    content_type: str | None, url_query: dict[str, str], wants: bool
) -> None:
    assert aws_json.wants_query(content_type, url_query) is wants


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unloaded() -> Any:
    aws_json._readers.cache_clear()
    yield
    aws_json._readers.cache_clear()


def test_without_botocore_the_error_says_what_to_install(unloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.loaders", None)

    with pytest.raises(ConfigError, match=r"pip install 'marq\[sqs\]'"):
        operations()


def test_a_model_in_the_home_directory_is_not_used(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "sqs" / "2012-11-05" / "service-2.json"
    model.parent.mkdir(parents=True)
    model.write_text('{"metadata": {}, "operations": {}, "shapes": {}}')
    extras = {"version": 1.0, "merge": {"operations": {"SendMessage": {"input": {"shape": "Nothing"}}}}}
    model.with_name("service-2.sdk-extras.json").write_text(json.dumps(extras))
    monkeypatch.setattr(Loader, "CUSTOMER_DATA_PATH", str(tmp_path))
    # The loader of any other program reads it.
    assert set(Loader().load_service_model("sqs", "service-2")["operations"]) == {"SendMessage"}

    assert operations() == set(FULL_CALLS)
