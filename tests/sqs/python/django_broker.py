"""The broker of django_client.py, in a module of its own because Django's settings can't import django-q2."""

from __future__ import annotations

import os
from typing import Any

from django_q.brokers.aws_sqs import Sqs


class SqsPerProcess(Sqs):
    """The broker of django-q2 (1.11.1), with a connection per process.

    The processes of a cluster are forks that share one HTTP connection. Without TLS, they get each other's responses:
    a delete gets the messages of a poll, and the poll waits until boto3 gives up.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        os.register_at_fork(after_in_child=self._reconnect)

    def _reconnect(self) -> None:
        self.connection = self.get_connection(self.list_key)
        self.sqs = self.connection.resource("sqs")
        self.queue = self.sqs.Queue(self.queue.url)
