"""The conditions of scenarios: a cluster, a proxy in front of a broker, clocks that can be moved, a disk that fills up.

A condition that this machine cannot create raises :class:`ConditionError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings
from marq_worker.broker import EmbeddedBroker, ports
from marq_worker.broker.settings import FIRST_NODE_ID, ClusterNode, new_cluster_id

HOST = "127.0.0.1"


class ConditionError(Exception):
    """This machine cannot create a condition that a scenario needs; the text says what to do."""


class Servers(Protocol):
    """One broker or several, perhaps with other resources of a scenario."""

    @property
    def bootstrap_servers(self) -> str: ...


@dataclass(frozen=True)
class ScenarioPlace:
    """A broker, and what else a scenario needs: proxies by client, a clock for the broker, a disk for a worker."""

    broker: EmbeddedBroker
    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    clock: WallClock | None = None
    disk: SmallDisk | None = None

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers


# --- a cluster --------------------------------------------------------------------------------------------------------

#: Heap of each node; two nodes must carry the load of three.
HEAP = "256m"
NODES, MIN_IN_SYNC = 3, 2
_REPLICATION = ("default", "offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
_IN_SYNC = ("min.insync.replicas", "transaction.state.log.min.isr", "share.coordinator.state.topic.min.isr")
#: Three JVMs start at the same time, and each waits for the others.
START_LIMIT_SECONDS = 180.0


class BrokerCluster:
    """Three nodes, each broker and controller with its own data until `close()`.

    By default, topics have as many replicas, two of which must have a record before `acks=all` answers. Methods block,
    except ``leader_of``. ``properties`` are on top of the settings of all nodes.
    """

    def __init__(self, properties: Mapping[str, str] | None = None) -> None:
        ids = range(FIRST_NODE_ID, FIRST_NODE_ID + NODES)
        controllers = {node: ports.free_port(HOST) for node in ids}
        cluster_id = new_cluster_id()
        settings = {f"{topic}.replication.factor": str(NODES) for topic in _REPLICATION}
        settings |= {**dict.fromkeys(_IN_SYNC, str(MIN_IN_SYNC)), **(properties or {})}
        self.nodes = {
            node: EmbeddedBroker(
                address=ports.join_address(HOST, ports.free_port(HOST)),
                membership=ClusterNode(node, controllers, cluster_id),
                properties=settings,
                heap=HEAP,
            )
            for node in ids
        }

    @property
    def bootstrap_servers(self) -> str:
        """All nodes' addresses, as clients expect them."""
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    @property
    def running(self) -> set[int]:
        return {node for node, broker in self.nodes.items() if broker.running}

    def start(self, *nodes: int) -> Self:
        """Start these nodes, or all, at the same time, because none is ready before most of the cluster runs.

        Raise BrokerError if one could not be started.
        """
        with ThreadPoolExecutor() as pool:
            starts = [pool.submit(self.nodes[node].start, START_LIMIT_SECONDS) for node in nodes or self.nodes]
        for start in starts:
            start.result()
        return self

    def kill(self, *nodes: int) -> None:
        """Send kill -9 to these nodes, or to all."""
        for node in nodes or self.nodes:
            self.nodes[node].kill()

    async def leader_of(self, topic: str, partition: int) -> int | None:
        """Return the node that leads this partition; None while there is none, or no such topic."""
        async with admin_client(ClientSettings.read(self.bootstrap_servers, environment={})) as admin:
            [described] = await admin.describe_topics([topic])
        leaders = {part["partition"]: part["leader"] for part in described["partitions"]}
        leader = leaders.get(partition, -1)
        return None if leader == -1 else leader

    def close(self) -> None:
        """End all nodes and delete their data."""
        self.kill()
        for node in self.nodes.values():
            node.close()

    def __enter__(self) -> Self:
        with ExitStack() as unless_started:
            unless_started.callback(self.close)
            self.start()
            unless_started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- a proxy ----------------------------------------------------------------------------------------------------------

CHUNK_BYTES = 64 << 10
#: Maximum chunks in transit for each direction of a connection; beyond that, the sender has to wait.
MAX_UNDERWAY = 1000
ANSWER_LIMIT_SECONDS = 10.0
#: close() sends RST instead of FIN: the other side notices at once, and data in transit is lost.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """A TCP proxy in front of a broker that passes, delays, cuts or swallows what goes through it.

    It accepts connections on ``port`` from its start on. It runs in its own thread, so it continues while the
    scenario's event loop waits. All methods block only for a moment.
    """

    def __init__(self) -> None:
        self.port = ports.free_port(HOST)
        self._upstream: tuple[str, int] | None = None
        self._delay_s = 0.0
        #: When a client connected, in seconds of the monotonic clock.
        self.accepted_at: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._open = {"to broker": asyncio.Event(), "to client": asyncio.Event()}
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def address(self) -> str:
        return ports.join_address(HOST, self.port)

    def forward_to(self, address: str) -> None:
        """Name the broker's own listener, host:port."""
        self._upstream = ports.split_address(address)

    def restore(self) -> None:
        """Forward all data at once, including data that `freeze` held."""
        self._call(self._restore())

    def delay(self, seconds: float) -> None:
        """Forward everything this much later, in each direction."""
        self._delay_s = seconds

    def cut(self) -> None:
        """Reset all connections and refuse new ones, until `restore()`."""
        self._call(self._cut())

    def freeze(self, *directions: str) -> None:
        """Keep connections and accept new ones, but forward nothing: neither data nor the end of a connection.

        Args:
            directions: ``"to broker"`` or ``"to client"`` (default: both).
        """
        for direction in directions or self._open:
            self._loop.call_soon_threadsafe(self._open[direction].clear)

    def close(self) -> None:
        """End all connections and the thread."""
        self._call(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        self._thread.start()
        self.restore()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _call(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(ANSWER_LIMIT_SECONDS)

    async def _restore(self) -> None:
        self._delay_s = 0.0
        for opened in self._open.values():
            opened.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, writers, pumps = asyncio.current_task(), [writer], list[asyncio.Task[None]]()
        assert task is not None
        self._tasks.add(task)
        self.accepted_at.append(time.monotonic())
        try:
            await self._open["to broker"].wait()
            assert self._upstream is not None, "call forward_to() before clients connect"
            upstream_reader, upstream = await asyncio.open_connection(*self._upstream)
            writers.append(upstream)
            pumps.append(asyncio.create_task(self._pump(reader, upstream, self._open["to broker"])))
            pumps.append(asyncio.create_task(self._pump(upstream_reader, writer, self._open["to client"])))
            # Whichever ends first ends both: Kafka's connections are never half closed.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the broker is down, so its client's connection ends
        except asyncio.CancelledError:
            # Cut; asyncio would report the cancelled handler.
            for one in writers:
                _reset(one)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in writers:
                one.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: asyncio.Event) -> None:
        """Forward until the end; a chunk's delay begins when it is read, so delays don't add up."""
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_UNDERWAY)
        reading = asyncio.create_task(self._read(reader, underway))
        try:
            while True:
                due, chunk = await underway.get()
                await asyncio.sleep(due - self._loop.time())
                await opened.wait()
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()
        except OSError:
            return  # the other side has ended
        finally:
            reading.cancel()

    async def _read(self, reader: asyncio.StreamReader, underway: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"first"
        while chunk:
            try:
                chunk = await reader.read(CHUNK_BYTES)
            except OSError:
                chunk = b""
            await underway.put((self._loop.time() + self._delay_s, chunk))


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # it is closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@contextmanager
def behind_proxies(*clients: str) -> Iterator[ScenarioPlace]:
    """Start a proxy for each of these clients, and a broker that may also be reached directly."""
    with ExitStack() as stack:
        proxies = {client: stack.enter_context(Proxy()) for client in clients}
        broker = stack.enter_context(EmbeddedBroker(proxied={client: proxy.port for client, proxy in proxies.items()}))
        for client, proxy in proxies.items():
            proxy.forward_to(broker.listener(client))
        yield ScenarioPlace(broker, proxies)


# --- wall clocks ------------------------------------------------------------------------------------------------------

#: Paths in Debian, Ubuntu and Fedora of the variant for multithreaded programs.
LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
#: Time within which a move takes effect.
MOVE_SECONDS = 1


class WallClock:
    """The wall clock of all processes that start with `environment`; the monotonic clock stays correct.

    It is correct until `move()`. Debian's libfaketime, loaded into the processes, reads the offset from a file.

    Raises:
        ConditionError: libfaketime is not installed.
    """

    def __init__(self, file: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self._file = file
        found = [library for pattern in libraries for library in sorted(Path("/").glob(pattern.lstrip("/")))]
        if not found:
            raise ConditionError(
                f"moving a process's clock needs libfaketime, which is not at {' or '.join(libraries)}:"
                " apt-get install faketime"
            )
        self._library = found[0]
        self.move(0)

    @property
    def environment(self) -> dict[str, Any]:
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # How often the file is read. Reading it at each call would take 5 us, and a JVM calls often.
            "FAKETIME_CACHE_DURATION": str(MOVE_SECONDS),
            # Durations come from the monotonic clock, which no machine sets.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # With its default, a JVM's timed waits return at once or never.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def move(self, seconds: float) -> None:
        """Set the clock this much ahead of the machine's, or behind it if negative."""
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}.new")
        new.write_text(f"{seconds:+f}\n", encoding="ascii")
        new.replace(self._file)  # atomic for readers


@contextmanager
def movable_broker() -> Iterator[ScenarioPlace]:
    """Start a broker whose wall clock can be moved."""
    with tempfile.TemporaryDirectory(prefix="marq-clock-") as folder:
        clock = WallClock(Path(folder) / "clock")
        with EmbeddedBroker(environment=clock.environment) as broker:
            yield ScenarioPlace(broker, clock=clock)


# --- a full disk ------------------------------------------------------------------------------------------------------

#: Several times the size of RocksDB's files in this scenario.
MEBIBYTES = 128
MOUNT_SECONDS = 30.0
BALLAST = "ballast"
CHUNK = bytes(1 << 16)
#: Unmounts at the end of its standard input, which the run closes, even if it dies.
_KEEPER = """trap '' HUP INT TERM; cat >/dev/null; umount -l "$1" """


class SmallDisk:
    """A tmpfs on ``path``, within the context; it never outlives this process.

    Raise ConditionError if this process may not mount.
    """

    def __init__(self, path: Path, mount: str = "mount") -> None:
        self.path = path
        self._mount = mount
        self._keeper: subprocess.Popen[bytes] | None = None

    def fill(self) -> None:
        with (self.path / BALLAST).open("ab", buffering=0) as ballast:
            size = len(CHUNK)
            while size:
                try:
                    ballast.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        (self.path / BALLAST).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        options = f"size={MEBIBYTES}m,mode=0700"
        command = [self._mount, "-t", "tmpfs", "-o", options, "marq-faults", str(self.path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=MOUNT_SECONDS)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise ConditionError(
                f"a full disk needs the right to mount a tmpfs on {self.path} ({reason}): run this as root, in a"
                " container with --cap-add SYS_ADMIN"
            ) from error
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "sh", str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper is not None
        self._keeper.communicate(timeout=MOUNT_SECONDS)


@contextmanager
def with_small_disk() -> Iterator[ScenarioPlace]:
    """Start a broker, and mount a disk for a worker."""
    with (
        tempfile.TemporaryDirectory(prefix="marq-disk-") as folder,
        SmallDisk(Path(folder)) as disk,
        EmbeddedBroker() as broker,
    ):
        yield ScenarioPlace(broker, disk=disk)
