"""Programs that end, or fork, while a SyncProducer is started: ``python -m tests.client.forking NAME SERVERS PREFIX``.

They are programs of their own because a fork of a test process would take the tests along.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest

import marq
from tests.client.waiting import wait_until
from tests.docs.pages import ROOT


def start_program(name: str, servers: str, prefix: str) -> subprocess.Popen[str]:
    """Start one of the programs below."""
    # Warnings are shown, so that nothing is left open silently. A fork of threads may hang: the tests are about that.
    warnings = ["-W", "default", "-W", "ignore::DeprecationWarning"]
    return subprocess.Popen(
        [sys.executable, *warnings, "-m", "tests.client.forking", name, servers, prefix], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_program(program: subprocess.Popen[str]) -> str:
    """Wait for the end of a program; return what it wrote to stderr."""
    try:
        _, errors = program.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise
    assert program.returncode == 0, errors
    return errors


def refused(producer: marq.SyncProducer) -> None:
    """Check in a child that an inherited producer is refused, and that its stop does nothing."""
    for call in (
        lambda: producer.send("q", b"by the child"),
        lambda: producer.send(["q"], b"by the child"),
        lambda: producer.send_many("q", [b"by the child"]),
        producer.start,
    ):
        with pytest.raises(marq.MarqError, match="create and start another SyncProducer in the child"):
            call()
    producer.stop()


def with_neighbours(producer: marq.SyncProducer, ended: threading.Event) -> list[threading.Thread]:
    """Let other threads send all the time, so that a fork finds the producer at work."""

    def send() -> None:
        while not ended.is_set():
            producer.send("neighbours", b"x")

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    return threads


def fork(servers: str, prefix: str) -> None:
    ended = threading.Event()
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        producer.send("q", b"before")
        threads = with_neighbours(producer, ended)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                refused(producer)
                with marq.SyncProducer(servers, prefix=prefix) as own:
                    own.send("q", b"by the child's own")
                # Nothing names the inherited one any more, and the interpreter ends as usual.
                producer = own
                gc.collect()
                sys.exit(0)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            producer.send("q", b"after")
        ended.set()
        for thread in threads:
            thread.join()


def within_with(servers: str, prefix: str) -> None:
    """The child leaves the block in which the producer is started."""
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        producer.send("q", b"before")
        child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def child_of_multiprocessing(producer: marq.SyncProducer, unstarted: marq.SyncProducer) -> None:
    refused(producer)
    with unstarted:
        unstarted.send("q", b"by the child's own")


def multiprocess(servers: str, prefix: str) -> None:
    """A pool of workers, as web servers have them; one producer is made before the fork and started after it."""
    unstarted = marq.SyncProducer(servers, prefix=prefix)
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        producer.send("q", b"before")
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=child_of_multiprocessing, args=(producer, unstarted)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
        producer.send("q", b"after")


def end(servers: str, prefix: str) -> None:
    """End without a stop, while a daemon thread is in the middle of a send."""
    producer = marq.SyncProducer(servers, prefix=prefix, request_timeout=60)
    producer.start()
    print("started", flush=True)  # noqa: T201
    # The broker hangs from here on.
    sys.stdin.readline()

    def send() -> None:
        with contextlib.suppress(marq.BrokerUnavailable):
            producer.send("q", b"accepted")

    threading.Thread(target=send, daemon=True).start()
    wait_until(lambda: producer._thread is not None and producer._thread._open)
    print("ending", flush=True)  # noqa: T201


if __name__ == "__main__":
    # aiokafka logs an error until a new topic has a leader. asyncio and warnings report unclosed resources.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    programs = {program.__name__: program for program in (fork, within_with, multiprocess, end)}
    programs[sys.argv[1]](*sys.argv[2:])
