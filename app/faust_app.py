"""Common parts of Marq's two Faust applications: the worker's, and that of its handler processes."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any, TypeVar

import faust

from marq.settings.client import ClientSettings
from marq_worker.config.settings import AppSettings
from marq_worker.faust_worker import MarqWorker
from marq_worker.transport.batch_transport import BatchConsumer, BatchTransport
from marq_worker.transport.credentials import credentials
from marq_worker.worker_exit_codes import EXIT_FENCED, EXIT_STALLED

log = logging.getLogger("marq.worker")

#: Time limit of a broker's answer, and by how much it must exceed the session timeout.
_REQUEST_SECONDS, _JOIN_SECONDS = 90.0, 10.0
#: A member learns of a rebalance with its next heartbeat, so a takeover takes up to this much longer.
HEARTBEAT_SECONDS = 0.5

Kind = TypeVar("Kind", bound="MarqApp")


class MarqApp(faust.App):
    """A Faust app on the batching transport, with our settings."""

    consumer: BatchConsumer
    settings: AppSettings
    client: ClientSettings
    log_level: str | int | None = None
    #: Whether Faust's own lines are logged, as `faust -A app worker` does.
    faust_log = True
    #: True if its start does not say what it is, and its stop does not say so either.
    quiet = False
    #: True if it needs a folder below the data directory.
    keeps_tables = False
    #: True if threads of handlers may be left when it has stopped.
    leaves_threads = False
    #: Exit code after the process has stopped itself.
    exit_code = 0

    def _new_transport(self) -> BatchTransport:
        return BatchTransport(self.conf.broker_consumer, self, loop=self.loop)

    def _create_directories(self) -> None:
        if self.keeps_tables:
            super()._create_directories()

    def fenced(self) -> None:
        """Stop this worker, because another one has joined the group with the same instance id."""
        log.critical(
            "group %s: this worker stops, because another worker joined with the same MARQ_INSTANCE_ID %r. Give each"
            " worker its own MARQ_INSTANCE_ID",
            self.conf.id, self.settings.instance_id,
        )  # fmt: skip
        self.end(EXIT_FENCED)

    def consumer_failed(self, error: BaseException) -> None:
        """Stop this process, because its consumer receives nothing more."""
        log.critical(
            "group %s: the consumer receives nothing more after an error: %r. Terminating with exit code %d, so that"
            " its supervisor restarts it",
            self.conf.id, error, EXIT_STALLED,
        )  # fmt: skip
        self.end(EXIT_STALLED)

    def end(self, exit_code: int) -> None:
        """Stop this process as SIGTERM does, with this exit code; may be called in any thread."""
        self.exit_code = exit_code
        os.kill(os.getpid(), signal.SIGTERM)

    def set_quiet(self, quiet: bool) -> None:
        """Take no more messages, or take messages again."""


def new_app(kind: type[Kind], app_id: str, settings: AppSettings, client: ClientSettings, **more: Any) -> Kind:
    """Create an application with our settings; its id is its consumer group."""
    app = kind(
        app_id,
        broker=[f"kafka://{address}" for address in client.bootstrap_servers.split(",")],
        broker_client_id=client.client_id,
        broker_credentials=credentials(client),
        Worker=MarqWorker,
        value_serializer="raw",
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=8 << 20,
        consumer_group_instance_id=settings.instance_id,
        broker_session_timeout=settings.session_timeout,
        # Must exceed the session timeout: the join of a member is answered when the session of a dead one is over.
        broker_request_timeout=max(_REQUEST_SECONDS, settings.session_timeout + _JOIN_SECONDS),
        broker_heartbeat_interval=HEARTBEAT_SECONDS,
        broker_max_poll_records=4_000,
        # With standbys Faust would assign partitions itself, even without tables.
        table_standby_replicas=0,
        stream_wait_empty=False,
        stream_buffer_maxsize=64,
        stream_recovery_delay=0.0,
        **more,
    )
    app.settings, app.client = settings, client
    return app
