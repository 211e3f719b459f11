"""A service of SQS that carries out a script (tests/sqs/script.py), with answers in a form that can be compared."""

from __future__ import annotations

import time
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.sqs.script import Call, Drain, HandleOf, PolicyTo, policy

LIMIT_SECONDS = 60.0
#: Members of answers that are not compared, and why.
IGNORED = {
    "MessageId": "each service chooses ids",
    "ReceiptHandle": "each service chooses handles",
    "Message": "the text of an error is for people",
    "ResponseMetadata": "boto3 adds it; its status is compared",
    "CreatedTimestamp": "the two calls come one after the other",
    "LastModifiedTimestamp": "the same",
    "SentTimestamp": "the same",
    "ApproximateFirstReceiveTimestamp": "the same",
    "ApproximateNumberOfMessages": "Marq counts every few seconds",
    "ApproximateNumberOfMessagesNotVisible": "the same",
    "ApproximateNumberOfMessagesDelayed": "the same",
    "SequenceNumber": "each service chooses numbers",
    "SenderId": "Marq does not record the senders of messages",
    "MD5OfMessageSystemAttributes": "moto leaves it out",
}


class Service:
    """A client of a service; ``account`` is the one in its URLs and ARNs."""

    def __init__(self, port: int, account: str) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._account = account
        self._client = boto3.client(
            "sqs",
            endpoint_url=self._url,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=Config(retries={"max_attempts": 0}),
        )
        #: The last one by queue and body.
        self._handles: dict[tuple[str, str], str] = {}

    def close(self) -> None:
        self._client.close()

    def call(self, call: Call) -> tuple[int, Any]:
        """Return status and answer, or status and code of the error."""
        try:
            answer = self._send(call.operation, call.queue, call.parameters)
        except ClientError as error:
            return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
        return answer["ResponseMetadata"]["HTTPStatusCode"], self._comparable(answer)

    def drain(self, drain: Drain) -> list[dict[str, Any]]:
        """Return the messages that come, sorted by their bodies."""
        messages: list[dict[str, Any]] = []
        deadline_s = time.monotonic() + LIMIT_SECONDS
        while len(messages) < len(drain.receives) and time.monotonic() < deadline_s:
            if drain.source is not None:
                assert not self._receive(drain._replace(queue=drain.source), wait_s=0)
            messages += self._receive(drain, wait_s=5)
        if drain.last:
            messages += self._receive(drain, wait_s=0)
        for message in messages:
            self._handles[drain.queue, message["Body"]] = message["ReceiptHandle"]
        return sorted((self._comparable(message) for message in messages), key=lambda message: str(message["Body"]))

    def _receive(self, drain: Drain, wait_s: int) -> list[dict[str, Any]]:
        parameters = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": wait_s, "MessageSystemAttributeNames": ["All"]}
        answer = self._send("receive_message", drain.queue, {**parameters, **drain.parameters})
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def _send(self, operation: str, queue: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
        resolved = self._resolved(parameters)
        if queue is not None:
            resolved["QueueUrl"] = f"{self._url}/{self._account}/{queue}"
        answer: dict[str, Any] = getattr(self._client, operation)(**resolved)
        return answer

    def _resolved(self, value: Any) -> Any:
        """Return parameters with the values of this service."""
        match value:
            case HandleOf():
                return self._handles[value.queue, value.body]
            case PolicyTo():
                return policy(f"arn:aws:sqs:us-east-1:{self._account}:{value.queue}", value.receives)
            case dict():
                return {name: self._resolved(item) for name, item in value.items()}
            case list():
                return [self._resolved(item) for item in value]
        return value

    def _comparable(self, value: Any) -> Any:
        """Return an answer without what services may choose: ignored members, accounts, the order of results."""
        match value:
            case str():
                return value.replace(self._account, "ACCOUNT").replace(self._url, "URL")
            case list():
                return sorted((self._comparable(item) for item in value), key=repr)
            case dict():
                members = {name: self._comparable(item) for name, item in value.items() if name not in IGNORED}
                # An empty list is as good as none.
                return {name: item for name, item in members.items() if item not in ([], {})}
        return value
