"""EmbeddedBroker: a real Kafka broker that a Python program starts, stops, kills, pauses and restarts.

All methods block; asynchronous callers use `asyncio.to_thread`.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from marq_worker.broker import downloads, errors, java, ports, settings
from marq_worker.broker.directory import BrokerDirectory
from marq_worker.broker.errors import BrokerError
from marq_worker.broker.process import ChildProcess
from marq_worker.broker.security import Security
from marq_worker.broker.settings import FIRST_NODE_ID, ClusterNode, new_cluster_id

START_LIMIT_SECONDS = 60.0
STOP_LIMIT_SECONDS = 30.0
FORMAT_LIMIT_SECONDS = 60.0
PORT_ATTEMPTS = 3
POLL_SECONDS = 0.02
DEFAULT_HEAP = "512m"
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


class EmbeddedBroker:
    """One Kafka node on the loopback interface, with automatic topic creation off.

    Args:
        data_directory: kept after `close()` (default: a temporary one).
        address: host:port (default: a free port, chosen once and kept across restarts).
        properties: on top of the broker's own settings.
        security: listeners with SASL and TLS, users and ACLs; the plain listener is then the administrator's.
        membership: makes it a node of a cluster, which is ready only when most of its nodes run.
        proxied: names of plain listeners behind a proxy each, with the ports on the same host that clients get.
        environment: variables on top of this process's.
        heap: as Java writes sizes ("1g"; default: $MARQ_BROKER_HEAP or 512m).
        java_flags: instead of those that shorten the start.

    A service with a password, on a broker where it has no permissions yet:

        certificates = Certificates.make(tmp_path)
        security = Security(["SASL_SSL"], users={"alice": "secret"}, certificates=certificates, acls=True)
        with EmbeddedBroker(security=security) as broker:
            MARQ_BOOTSTRAP_SERVERS = broker.listener("SASL_SSL"), MARQ_SECURITY_PROTOCOL = "SASL_SSL"
            MARQ_SASL_MECHANISM = "SCRAM-SHA-512", MARQ_SASL_USERNAME = "alice", MARQ_SASL_PASSWORD = "secret"
            MARQ_SSL_CAFILE = certificates.authority
            administrator = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    """

    def __init__(
        self,
        data_directory: Path | str | None = None,
        *,
        address: str | None = None,
        properties: Mapping[str, str] | None = None,
        security: Security | None = None,
        membership: ClusterNode | None = None,
        proxied: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        heap: str | None = None,
        java_flags: Sequence[str] | None = None,
    ) -> None:
        self._kept_directory = None if data_directory is None else Path(data_directory).resolve()
        self._security = security or Security(())
        self._properties = {**self._security.properties(), **(properties or {})}
        self._membership = membership
        self._proxied = dict(proxied or {})
        self._environment = dict(environment or {})
        self._further: dict[str, int] = {}
        self._heap = heap
        self._java_flags = java_flags
        self._address = None if address is None else ports.split_address(address)
        self._directory: BrokerDirectory | None = None
        self._process: ChildProcess | None = None

    @property
    def bootstrap_servers(self) -> str:
        """host:port for clients, the same after a restart. Raises BrokerError before the first start."""
        if self._address is None:
            raise BrokerError("the embedded broker has no address before its first start()")
        return ports.join_address(*self._address)

    def listener(self, name: str) -> str:
        """Return host:port of a listener in `security` or `proxied`, the same after a restart. Raises BrokerError."""
        if self._address is None or name not in self._further:
            raise BrokerError(
                f"the embedded broker has no listener {name!r}: name it in `security` or `proxied`, and start() it"
            )
        return ports.join_address(self._address[0], self._further[name])

    @property
    def data_directory(self) -> Path:
        """Where the broker keeps topics, settings and logs. Raises BrokerError before the first start."""
        return self._started_directory().path

    @property
    def pid(self) -> int | None:
        """The broker's process id while it runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the broker's process is there, paused or not."""
        return self._process is not None and self._process.running

    def start(self, limit_seconds: float = START_LIMIT_SECONDS) -> Self:
        """Start the broker and return when topics can be created; does nothing if it runs.

        Raises BrokerError: no Java, no jars, port taken, disk full, or not ready within `limit_seconds`.
        """
        if self.running:
            return self
        self.kill()  # the watchdog of a broker that ended by itself
        runtime, class_path = java.find(), downloads.class_path()
        if self._directory is None:
            self._directory = BrokerDirectory(self._kept_directory)
        command = self._java_command(runtime, class_path)
        for _ in range(PORT_ATTEMPTS):
            host, port = self._address or ("127.0.0.1", ports.free_port("127.0.0.1"))
            names = [*self._security.protocols, *self._proxied]
            further = self._further or {name: ports.free_port(host) for name in names}
            refusal = self._try(command, host, port, further, limit_seconds)
            if refusal is None:
                self._address, self._further = (host, port), further  # clients know them from now on
                return self
            # Another process may have taken the free port before the broker's bind; only then try again.
            if not errors.is_port_conflict(self._started_directory().log()):
                break
        raise BrokerError(refusal)

    def stop(self, limit_seconds: float = STOP_LIMIT_SECONDS) -> None:
        """Stop cleanly and keep the data; kill -9 after `limit_seconds`. Does nothing if it does not run."""
        if self._process is not None:
            self._process.terminate()
            self._process.join(limit_seconds)
            self._process = None
        self._unlock()

    def kill(self) -> None:
        """kill -9: nothing is flushed or handed over. `start()` brings it back with its data."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._unlock()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, as with a broker that hangs."""
        if self._process is None or not self.running:
            raise BrokerError("the embedded broker does not run: start() it before pause()")
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT after `pause()`; otherwise does nothing."""
        if self._process is not None:
            self._process.resume()

    def close(self) -> None:
        """Stop, and delete a temporary data directory."""
        self.stop()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def why_it_ended(self) -> str:
        """Return why the broker, which has ended by itself, did so, with the end of its log."""
        directory = self._started_directory()
        what = "the broker exited unexpectedly"
        return errors.explain(what, directory.log(), directory=directory.path, address=self.bootstrap_servers)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unlock(self) -> None:
        if self._directory is not None:
            self._directory.unlock()

    def _started_directory(self) -> BrokerDirectory:
        if self._directory is None:
            raise BrokerError("the embedded broker has no data directory before its first start()")
        return self._directory

    def _java_command(self, runtime: java.Runtime, class_path: str) -> list[str]:
        heap = self._heap or os.environ.get("MARQ_BROKER_HEAP") or DEFAULT_HEAP
        flags = self._java_flags
        if flags is None:
            flags = java.archive_flags(java.archive_path(runtime, class_path))
        return [
            str(runtime.path),
            f"-Xmx{heap}",
            # The steadiest on two cores; throughput with the serial one falls to a third in old-generation collections.
            "-XX:+UseParallelGC",
            *flags,
            f"-Dlog4j2.configurationFile={LOG_SETTINGS}",
            f"-Dmarq.broker.logs={self._started_directory().logs}",
            "-cp",
            class_path,
        ]

    def _try(
        self, command: list[str], host: str, port: int, further: Mapping[str, int], limit_seconds: float
    ) -> str | None:
        """Start once; return why it failed, or None."""
        if (error := ports.bind_error(host, port)) is not None:
            raise BrokerError(errors.not_bound(host, port, error))
        directory = self._started_directory()
        directory.lock()
        membership = self._membership or _alone()
        directory.write_settings(
            settings.server_properties(
                host=host,
                port=port,
                membership=membership,
                log_directory=str(directory.data),
                extra=self._properties,
                further=further,
                proxied=self._proxied,
            )
        )
        if not directory.formatted:
            _format(command, directory, membership.cluster_id, self._security.format_options())
        server = [*command, "kafka.Kafka", str(directory.server_properties)]
        self._process = ChildProcess(
            server,
            directory.console,
            directory=directory.path,
            environment={**os.environ, **self._environment},
            temporary=directory.temporary,
        ).start()
        try:
            if _wait_until_ready(self._process, host, port, membership.node_id, limit_seconds):
                return None
            exit_code, log = self._process.exit_code, directory.log()
        except BaseException:
            self.kill()  # Ctrl-C while it starts
            raise
        self.kill()
        what = errors.not_ready(exit_code, limit_seconds)
        return errors.explain(what, log, directory=directory.path, address=ports.join_address(host, port))


def _alone() -> ClusterNode:
    return ClusterNode(FIRST_NODE_ID, {FIRST_NODE_ID: ports.free_port("127.0.0.1")}, new_cluster_id())


def _format(command: list[str], directory: BrokerDirectory, cluster_id: str, options: Sequence[str]) -> None:
    """Write the cluster id, the feature levels and the users, as Kafka requires before the first start."""
    tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(directory.server_properties), *options]
    with directory.console.open("wb") as output:
        result = subprocess.run(
            [*command, *tool],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=FORMAT_LIMIT_SECONDS,
            check=False,
        )
    if result.returncode != 0:
        what = "the broker's data directory cannot be prepared"
        raise BrokerError(errors.explain(what, directory.log(), directory=directory.path, address=""))


def _wait_until_ready(process: ChildProcess, host: str, port: int, node_id: int, limit_seconds: float) -> bool:
    deadline = time.monotonic() + limit_seconds
    while process.running and time.monotonic() < deadline:
        if ports.is_ready(host, port, node_id):
            # Another process may answer on a port that this broker did not get.
            return process.running
        time.sleep(POLL_SECONDS)
    return False
