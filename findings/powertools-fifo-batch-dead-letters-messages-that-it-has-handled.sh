#!/usr/bin/env bash
# Shows that Powertools' FIFO batches can repeat a message that they have handled, until it is a dead letter.
#
# aws-lambda-powertools 3.37.0, pydantic 2.14.3, boto3 1.44.5, moto 5.2.5 as SQS. A Lambda function handles a FIFO queue
# with SqsFifoPartialProcessor and a pydantic model of its messages. Message 1 is of one group, 2 and 3 are of another.
# The handler fails with message 2, and message 3 does not match the model. The script polls as Lambda does: it deletes
# the messages that the function does not report as failed, and none if the function raises. After three receives, a
# message that is still in the queue becomes a dead letter.
# Expected: the function reports 2 and 3 as failed, and 1 is handled once and deleted. For a message that does not match
# the model, the processor reports that message as failed. A fix from 2023 (issue 2091) added this.
# Seen: the processor reports each of the two faults alone like this. Together they make the function raise
# ValidationError, so Lambda returns the whole batch. Message 1 is handled at each of three receives, and becomes a dead
# letter although each call succeeded. If message 2 fails only once, message 1 is handled twice.
# After a failure, _process_record() of the processor skips the other messages, or with skip_group_on_error those of the
# same group, and reports them. It converts each skipped message to the model first. This conversion is outside of the
# try block that catches validation errors, which is in the method of the parent class. Tests with only
# one of the faults do not reach this code. As a workaround, parse messages in the handler: without a model in the
# processor, 1 is handled once. Messages 2 and 3 become dead letters in any case, because they fail at each receive.
# Output seen:
#   model, 3 is wrong: handled 1 2, dead letters 3
#   model, 2 fails once: handled 1 2 2 3, dead letters none
#   no model, 2 fails once, 3 is wrong: handled 1 2 2, dead letters 3
#   model, 2 fails once, 3 is wrong: handled 1 2 1 2, dead letters 3, ValidationError
#   no model, 2 fails, 3 is wrong: handled 1 2 2 2, dead letters 2 3
#   model, 2 fails, 3 is wrong: handled 1 2 1 2 1 2, dead letters 1 2 3, ValidationError
#   model, skip_group_on_error, 2 fails, 3 is wrong: handled 1 2 1 2 1 2, dead letters 1 2 3, ValidationError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'aws-lambda-powertools==3.37.0' 'pydantic==2.14.3' 'moto==5.2.5' 'boto3==1.44.5'
cat >main.py <<'PYTHON'
import json, os, sys
from importlib.metadata import version
import boto3
from aws_lambda_powertools.utilities.batch import SqsFifoPartialProcessor, process_partial_response
from aws_lambda_powertools.utilities.parser.models import SqsRecordModel
from moto import mock_aws
from pydantic import BaseModel, Json, ValidationError

os.environ.update(AWS_DEFAULT_REGION="eu-west-1", AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
print(*(f"{name} {version(name)}" for name in ("aws-lambda-powertools", "pydantic", "moto", "boto3")))
ARN = "arn:aws:sqs:eu-west-1:123456789012:"
GROUPS = {1: "a", 2: "b", 3: "b"}
RECEIVES = 3

class Order(BaseModel):
    number: int

class Message(SqsRecordModel):
    body: Json[Order]

def record(message):
    """Return the message as Lambda hands it to a function."""
    return {"messageId": message["MessageId"], "receiptHandle": message["ReceiptHandle"], "body": message["Body"],
            "attributes": message["Attributes"], "messageAttributes": {}, "md5OfBody": message["MD5OfBody"],
            "eventSource": "aws:sqs", "eventSourceARN": f"{ARN}orders.fifo", "awsRegion": "eu-west-1"}

def text(values):
    return " ".join(map(str, values)) or "none"

@mock_aws
def run(options, failures, wrong):
    """Poll as Lambda does; return the handled messages, the dead letters, and whether a validation error was raised."""
    sqs, attributes = boto3.client("sqs"), {"FifoQueue": "true"}
    dead = sqs.create_queue(QueueName="dead.fifo", Attributes=attributes)["QueueUrl"]
    policy = json.dumps({"deadLetterTargetArn": f"{ARN}dead.fifo", "maxReceiveCount": str(RECEIVES)})
    url = sqs.create_queue(QueueName="orders.fifo", Attributes=attributes | {"RedrivePolicy": policy})["QueueUrl"]
    numbers = {}
    for number, group in GROUPS.items():
        body = json.dumps({"order" if number in wrong else "number": number})
        fifo = {"MessageGroupId": group, "MessageDeduplicationId": str(number)}
        numbers[sqs.send_message(QueueUrl=url, MessageBody=body, **fifo)["MessageId"]] = number
    handled, invalid = [], False

    def handler(record):
        number = record.body.number if "model" in options else json.loads(record.body)["number"]
        handled.append(number)
        if number == 2 and handled.count(2) <= failures:
            raise OSError("the database does not answer")

    def receive(queue):
        return sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, AttributeNames=["All"]).get("Messages", [])

    processor = SqsFifoPartialProcessor(**options)
    while messages := receive(url):
        event = {"Records": [record(message) for message in messages]}
        try:
            response = process_partial_response(event, handler, processor)
            failed = {item["itemIdentifier"] for item in response["batchItemFailures"]}
        except Exception as error:
            invalid |= isinstance(error, ValidationError)
            failed = {message["MessageId"] for message in messages}
        for message in messages:
            key = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
            if message["MessageId"] in failed:
                sqs.change_message_visibility(**key, VisibilityTimeout=0)
            else:
                sqs.delete_message(**key)
    letters = sorted(numbers[message["MessageId"]] for message in receive(dead))
    return f"handled {text(handled)}, dead letters {text(letters)}{', ValidationError' if invalid else ''}"

MODEL, SKIP = {"model": Message}, {"skip_group_on_error": True}
REPEATED = "handled 1 2 1 2 1 2, dead letters 1 2 3, ValidationError"
CASES = (("model, 3 is wrong", MODEL, 0, {3}, "handled 1 2, dead letters 3"),
         ("model, 2 fails once", MODEL, 1, set(), "handled 1 2 2 3, dead letters none"),
         ("no model, 2 fails once, 3 is wrong", {}, 1, {3}, "handled 1 2 2, dead letters 3"),
         ("model, 2 fails once, 3 is wrong", MODEL, 1, {3}, "handled 1 2 1 2, dead letters 3, ValidationError"),
         ("no model, 2 fails, 3 is wrong", {}, RECEIVES, {3}, "handled 1 2 2 2, dead letters 2 3"),
         ("model, 2 fails, 3 is wrong", MODEL, RECEIVES, {3}, REPEATED),
         ("model, skip_group_on_error, 2 fails, 3 is wrong", MODEL | SKIP, RECEIVES, {3}, REPEATED))
changed = False
for title, options, failures, wrong, as_seen in CASES:
    result = run(options, failures, wrong)
    print(f"{title}: {result}", flush=True)
    changed |= result != as_seen
sys.exit(changed)
PYTHON
venv/bin/python main.py
