"""Celery on Marq, through the SQS endpoint of a worker.

``celery -A examples.celery_tasks worker`` runs tasks; ``python -m examples.celery_tasks 10`` sends ten.
"""
# ruff: noqa: T201 - printing is what an example is for

import os
import sys

from celery import Celery

# ACCESSKEYID:SECRET of the keys file; without one, any two words do. Percent-encode special characters.
app = Celery("examples", broker=os.environ.get("CELERY_BROKER_URL", "sqs://any:any@127.0.0.1:9324"))
app.conf.update(
    task_default_queue="celery-tasks",
    # Delete a message after its task, not before: a task whose worker is killed then runs again.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    # Longer than any task takes, together with the prefetched tasks before it.
    broker_transport_options={"is_secure": False, "region": "us-east-1", "visibility_timeout": 600},
    worker_prefetch_multiplier=1,
    # They need broadcasts, which SQS does not have.
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
)


# With a name, because this program sends as __main__ and the worker imports examples.celery_tasks.
@app.task(name="send_email")
def send_email(to: str) -> None:
    print(f"sent to {to}")


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        send_email.delay(f"user-{number}@example.org")
    print("sent", sys.argv[1])
