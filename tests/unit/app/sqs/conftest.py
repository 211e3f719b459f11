"""Clients of boto3 whose requests are caught before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.unit.app.sqs.caught import ACCESS_KEY, ENDPOINT, SECRET, Caught


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
