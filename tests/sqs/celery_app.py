"""The Celery application of test_celery.py, which runs in Celery's environment.

``celery -A celery_app worker`` runs tasks, and ``python celery_app.py FIRST LAST PAUSE`` sends one per number, with a
pause in seconds after each. Variables: BROKER, the broker's URL; VISIBILITY_S; NOTES, a file to which all processes
append what happens, as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from botocore.client import BaseClient
from celery import Celery
from celery.signals import task_received

WORK_S, RETRY_S = 0.02, 0.5

app = Celery("faults", broker=os.environ["BROKER"])
app.conf.update(
    task_default_queue="celery-faults",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "is_secure": False,
        "region": "us-east-1",
        "visibility_timeout": int(os.environ["VISIBILITY_S"]),
        # A worker whose prefetched tasks have ended polls again after this time.
        "polling_interval": 0.1,
    },
)


def note(event: str, **details: Any) -> None:
    line = json.dumps({"event": event, "at": time.time(), **details}) + "\n"
    file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND)
    # In one piece, because several processes write.
    os.write(file, line.encode())
    os.close(file)


@task_received.connect
def received(request: Any, **_: Any) -> None:
    message = request.message.delivery_info["sqs_message"]
    count = int(message["Attributes"]["ApproximateReceiveCount"])
    details = {"message": message["MessageId"], "handle": message["ReceiptHandle"], "count": count}
    note("received", task=request.id, worker=os.getpid(), **details)


call = BaseClient._make_api_call


def noted_call(client: BaseClient, operation: str, parameters: dict[str, Any]) -> Any:
    answer = call(client, operation, parameters)
    if operation == "DeleteMessage":
        note("deleted", handle=parameters["ReceiptHandle"])
    return answer


BaseClient._make_api_call = noted_call


@app.task(bind=True, name="work")
def work(self: Any, number: int) -> None:
    details = {"task": self.request.id, "number": number, "worker": os.getppid()}
    note("began", **details)
    time.sleep(WORK_S)
    note("ended", **details)


def send(number: int) -> None:
    """Send until the endpoint confirms it."""
    while True:
        try:
            work.delay(number)
            return
        except Exception as error:
            note("not sent", number=number, error=repr(error)[:200])
            time.sleep(RETRY_S)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        send(number)
        time.sleep(float(sys.argv[3]))
