"""Clients of boto3 whose requests are caught before they are sent, and queues whose definitions are in a list."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import boto3
import pytest
from botocore.config import Config

import marq.queues.following
from marq.queues.queues import Queues
from marq.settings.definitions import Definitions
from marq.wire.errors import BrokerUnavailable
from tests.unit.app.sqs.caught import ACCESS_KEY, ENDPOINT, SECRET, Caught
from tests.unit.client.list_log import ListLog


class EmptyQueues(ListLog):
    #: A write that contains this key fails once.
    refused: bytes | None = None

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        if self.refused in records:
            self.refused = None
            raise BrokerUnavailable("away")
        return await super().write(records)

    async def messages_of(self, queue: str, definitions: Definitions) -> str:
        return ""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> EmptyQueues:
    log = EmptyQueues()
    monkeypatch.setattr(marq.queues.following, "definition_log", lambda _: log)
    return log


@pytest.fixture
async def queues(log: EmptyQueues) -> AsyncIterator[Queues]:
    async with Queues("none:1") as queues:
        yield queues


@pytest.fixture
def caught() -> Caught:
    return Caught()


@pytest.fixture(scope="session")
def session() -> boto3.Session:
    return boto3.Session(ACCESS_KEY, SECRET, region_name="us-east-1")


@pytest.fixture
def client_at(session: boto3.Session, caught: Caught) -> Iterator[Callable[[str], Any]]:
    clients = []

    def create(url: str) -> Any:
        config = Config(retries={"total_max_attempts": 1})
        client = session.client("sqs", endpoint_url=url, config=config)
        client.meta.events.register("before-send.sqs", caught.send)
        clients.append(client)
        return client

    yield create
    for client in clients:
        client.close()


@pytest.fixture
def client(client_at: Callable[[str], Any]) -> Any:
    return client_at(ENDPOINT)
