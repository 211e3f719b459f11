"""Uses an endpoint as programs with django-q2 do: a cluster runs tasks, one of which fails at first.

The file is Django's settings, the module with the tasks, and the program. Variables: ENDPOINT, a URL. Prints one line
of JSON with the number of deleted messages per queue. Fails on the first difference.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

TASKS = 20
RETRY_S = 8
LIMIT_S = 120

DIRECTORY = Path(os.environ.setdefault("DJANGO_CLIENT_DIRECTORY", ""))
SECRET_KEY = "for tests only"
USE_TZ = True
INSTALLED_APPS = ["django_q"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DIRECTORY / "database.sqlite3",
        "OPTIONS": {"timeout": 60},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
# The time after which a task that was not acknowledged comes again is the visibility timeout of each receive.
Q_CLUSTER = {
    "name": "django-tasks",
    "broker_class": "django_broker.SqsPerProcess",
    "workers": 2,
    "bulk": 10,
    "timeout": RETRY_S - 2,
    "retry": RETRY_S,
    "save_limit": 0,
    "sqs": {
        "aws_region": "us-east-1",
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
        "receive_message_wait_time_seconds": 5,
    },
}


def work(name: str) -> str:
    return f"done: {name}"


def fail_once(name: str) -> str:
    try:
        (DIRECTORY / "failed").touch(exist_ok=False)
    except FileExistsError:
        return f"done: {name}"
    raise ValueError("on purpose")


def check(cluster: subprocess.Popen[bytes]) -> None:
    from django_q.brokers import get_broker
    from django_q.models import Task
    from django_q.tasks import async_task, fetch

    names = [f"task {number} é🚀" for number in range(TASKS)]
    ids = {async_task("django_client.work", name): name for name in names}
    failing = async_task("django_client.fail_once", "fails once")
    ids[failing] = "fails once"
    until = time.monotonic() + LIMIT_S
    while Task.objects.filter(success=True).count() < len(ids):
        assert cluster.poll() is None, f"the cluster has ended with {cluster.returncode}"
        assert time.monotonic() < until, list(Task.objects.values_list("name", "success", "result"))
        time.sleep(0.2)
    results = {task_id: fetch(task_id) for task_id in ids}
    assert {task_id: task.result for task_id, task in results.items()} == {
        task_id: f"done: {name}" for task_id, name in ids.items()
    }
    assert {task_id: task.attempt_count for task_id, task in results.items()} == {
        task_id: 2 if task_id == failing else 1 for task_id in ids
    }
    broker = get_broker()
    assert broker.ping()
    assert broker.info() == "AWS SQS"
    # Each task was deleted.
    while broker.queue.load() or broker.queue_size() or broker.lock_size():
        assert time.monotonic() < until, (broker.queue_size(), broker.lock_size())
        time.sleep(0.5)


def main() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    cluster = subprocess.Popen([sys.executable, "-m", "django", "qcluster"], stdout=sys.stderr)
    try:
        check(cluster)
    finally:
        cluster.send_signal(signal.SIGTERM)
        try:
            cluster.wait(LIMIT_S)
        finally:
            cluster.kill()
    sys.stdout.write(json.dumps({"django-tasks": TASKS + 1}))


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        os.environ |= {
            "AWS_ENDPOINT_URL_SQS": os.environ["ENDPOINT"],
            "DJANGO_CLIENT_DIRECTORY": directory,
            "DJANGO_SETTINGS_MODULE": "django_client",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        main()
