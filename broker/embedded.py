"""EmbeddedBroker: a real Kafka broker that a Python program starts, stops, kills, pauses and restarts.

All methods block; asynchronous callers use `asyncio.to_thread`.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from broker import archive, failure, jars, java, ports, probe, settings
from broker.directory import BrokerDirectory
from broker.errors import BrokerError
from broker.membership import FIRST_NODE_ID, Membership, new_cluster_id
from broker.process import BrokerProcess
from broker.security import Security

START_LIMIT_SECONDS = 60.0
STOP_LIMIT_SECONDS = 30.0
FORMAT_LIMIT_SECONDS = 60.0
PORT_ATTEMPTS = 3
POLL_SECONDS = 0.02
DEFAULT_HEAP = "512m"
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


class EmbeddedBroker:
    """One Kafka node on the loopback interface, with automatic topic creation off.

    `address` is a fixed host:port; without it, free ports are chosen once and kept over restarts. `data_directory` is
    kept for ever; without it, a temporary one lives until `close()`. `properties` go over the broker's own settings.
    `heap` is Java's word for a size ("1g"); without it, $MARQ_BROKER_HEAP or 512m. `java_flags` replace those that make
    the start quick; `environment` is added to the process's. Nothing happens before `start()`.

    `membership` makes it one node of a cluster, which is ready only when most of the nodes run. `proxied` adds plain
    listeners that stand behind a proxy each: their names, and the ports on the same host that clients are told.

    `security` adds listeners with SASL and TLS, users and ACLs (see `broker.security`); the plain one is then the
    administrator's. For a service with a password of its own, on a broker where it may nothing yet:

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
        membership: Membership | None = None,
        proxied: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        heap: str | None = None,
        java_flags: Sequence[str] | None = None,
    ) -> None:
        self._given_directory = None if data_directory is None else Path(data_directory).resolve()
        self._given_address = None if address is None else ports.split_address(address)
        self._security = security or Security(())
        self._properties = {**self._security.properties(), **(properties or {})}
        self._membership = membership
        self._proxied = dict(proxied or {})
        self._environment = dict(environment or {})
        self._further: dict[str, int] = {}
        self._heap = heap
        self._java_flags = java_flags
        self._address = self._given_address
        self._directory: BrokerDirectory | None = None
        self._process: BrokerProcess | None = None

    @property
    def bootstrap_servers(self) -> str:
        """host:port for clients; the same before and after a restart. Raises BrokerError before the first start."""
        if self._address is None:
            raise BrokerError("the embedded broker has no address before its first start()")
        return ports.join_address(*self._address)

    def listener(self, name: str) -> str:
        """host:port of the listener with this security protocol or name; the same before and after a restart.

        Raises BrokerError before the first start, and where neither `security` nor `proxied` names such a listener.
        """
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
        """Start the broker and return when it takes topics; does nothing if it runs.

        Raises BrokerError: no Java, no jars, port taken, no room, or not ready within `limit_seconds`.
        """
        if self.running:
            return self
        self.kill()  # what is left of a broker that ended by itself: its watchdog
        runtime, class_path = java.find(), jars.class_path()
        if self._directory is None:
            self._directory = BrokerDirectory(self._given_directory)
        command = self._java_command(runtime, class_path)
        for _ in range(PORT_ATTEMPTS):
            host, port = self._address or ("127.0.0.1", ports.free_port("127.0.0.1"))
            names = [*self._security.protocols, *self._proxied]
            further = self._further or {name: ports.free_port(host) for name in names}
            refusal = self._try(command, host, port, further, limit_seconds)
            if refusal is None:
                self._address, self._further = (host, port), further  # from now on clients know them
                return self
            # Between our look at a free port and the broker's bind somebody else may have taken it: only then again.
            if not failure.is_port_conflict(self._started_directory().log()):
                break
        raise BrokerError(refusal)

    def stop(self, limit_seconds: float = STOP_LIMIT_SECONDS) -> None:
        """Stop cleanly and keep the data; kill -9 after `limit_seconds`. Does nothing if it does not run."""
        if self._process is not None:
            self._process.stop(limit_seconds)
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
        """SIGCONT after `pause()`; does nothing else."""
        if self._process is not None:
            self._process.resume()

    def restart(self, limit_seconds: float = START_LIMIT_SECONDS) -> Self:
        """Clean stop, then start on the same address with the same data."""
        self.stop()
        return self.start(limit_seconds)

    def close(self) -> None:
        """Stop, and delete the data directory if it was a temporary one. `start()` then begins anew."""
        self.stop()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def log_tail(self) -> str:
        """The end of what the broker and its JVM have written."""
        return failure.end(self._started_directory().log())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            flags = archive.use_flags(archive.path(runtime, class_path))
        return [
            str(runtime.path),
            f"-Xmx{heap}",
            # On two cores as fast to start as the others and the steadiest when topics are drained; the serial one
            # falls to a third while it collects the old generation.
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
        """Start once. Returns why not, or None when the broker is up."""
        if not ports.is_free(host, port):
            raise BrokerError(failure.port_taken(host, port))
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
        self._process = BrokerProcess(server, directory, self._environment)
        try:
            if _wait_until_ready(self._process, host, port, membership.node_id, limit_seconds):
                return None
            exit_code, log = self._process.exit_code, directory.log()
        except BaseException:
            self.kill()  # Ctrl-C while it starts
            raise
        self.kill()
        what = failure.not_ready(exit_code, limit_seconds)
        return failure.explain(what, log, directory=directory.path, address=ports.join_address(host, port))


def _alone() -> Membership:
    return Membership(FIRST_NODE_ID, {FIRST_NODE_ID: ports.free_port("127.0.0.1")}, new_cluster_id())


def _format(command: list[str], directory: BrokerDirectory, cluster_id: str, options: Sequence[str]) -> None:
    """Write the cluster id, the feature levels and the users, which Kafka does not do by itself."""
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
        raise BrokerError(failure.explain(what, directory.log(), directory=directory.path, address=""))


def _wait_until_ready(process: BrokerProcess, host: str, port: int, node_id: int, limit_seconds: float) -> bool:
    deadline = time.monotonic() + limit_seconds
    while process.running and time.monotonic() < deadline:
        if probe.is_ready(host, port, node_id):
            # Somebody else may answer on a port that our broker failed to get.
            return process.running
        time.sleep(POLL_SECONDS)
    return False
