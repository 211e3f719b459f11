"""A TCP proxy in front of a broker: passes, delays, cuts or swallows what goes through it, as a scenario switches it.

It runs in its own thread, so it continues while the scenario's event loop waits. All methods block only for a
moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from typing import Any, Literal, Self

from marq_worker.broker import ports

Direction = Literal["both", "to broker", "to client"]

HOST = "127.0.0.1"
CHUNK_BYTES = 64 << 10
#: Maximum chunks in transit for each direction of a connection; beyond that, the sender has to wait.
MAX_UNDERWAY = 1000
ANSWER_LIMIT_SECONDS = 10.0
#: close() sends RST instead of FIN: the other side notices at once, and data in transit is lost.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Accepts connections on ``port`` from its start on, and forwards them to the address set by `forward_to`."""

    def __init__(self) -> None:
        self.port = ports.free_port(HOST)
        self._upstream: tuple[str, int] | None = None
        self._delay_s = 0.0
        #: When a client connected, in seconds of the monotonic clock.
        self.accepted_at: list[float] = []
        self._connections: set[asyncio.StreamWriter] = set()
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

    def freeze(self, direction: Direction = "both") -> None:
        """Keep connections and accept new ones, but forward nothing: neither data nor the end of a connection."""
        self._call(self._freeze(direction))

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

    async def _freeze(self, direction: Direction) -> None:
        for name, opened in self._open.items():
            if direction in ("both", name):
                opened.clear()

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        for writer in self._connections:
            _reset(writer)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        self.accepted_at.append(time.monotonic())
        try:
            await self._connect(reader, writer)
        except asyncio.CancelledError:
            pass  # cut: asyncio would report the cancelled handler
        finally:
            writer.close()
            self._connections.discard(writer)
            self._tasks.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open["to broker"].wait()
        assert self._upstream is not None, "call forward_to() before clients connect"
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            return  # the broker is down, so its client's connection ends
        self._connections.add(upstream_writer)
        try:
            # Whichever ends first ends both: Kafka's connections are never half closed.
            await _first_of(
                self._pump(reader, upstream_writer, self._open["to broker"]),
                self._pump(upstream_reader, writer, self._open["to client"]),
            )
        finally:
            upstream_writer.close()
            self._connections.discard(upstream_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: asyncio.Event) -> None:
        """Forward until the end; a chunk's delay begins when it is read, so delays don't add up."""
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_UNDERWAY)
        await _first_of(self._read(reader, underway), _write(underway, writer, opened))

    async def _read(self, reader: asyncio.StreamReader, underway: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"first"
        while chunk:
            try:
                chunk = await reader.read(CHUNK_BYTES)
            except OSError:
                chunk = b""
            await underway.put((self._loop.time() + self._delay_s, chunk))
        await asyncio.Event().wait()  # the writer ends it once the end has got through


async def _write(
    underway: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, opened: asyncio.Event
) -> None:
    while True:
        due, chunk = await underway.get()
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        await opened.wait()
        if not chunk:
            return
        try:
            writer.write(chunk)
            await writer.drain()
        except OSError:
            return


async def _first_of(*actions: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(action) for action in actions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # it is closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
