"""The pytest plugin with the fixture ``marq_broker``; it loads the broker at its first use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from marq.testing.broker import Broker

_OPTION = "marq_toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "The file of the project whose queues and handlers marq_broker has; empty for none (default: marq.toml)."
    parser.addini(_OPTION, text, default="marq.toml")


@pytest.fixture
def marq_broker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker in memory, which the test's clients use unless they have another address.

    It has the queues of the project's marq.toml: the nearest one, from the directory of the test up to the root
    directory of pytest. Without arguments, ``run`` and ``worker`` run the handlers that the project's workers run.
    """
    from marq.testing.broker import Broker

    file = _project_file(request)
    broker = Broker() if file is None else _broker_of(file)
    if file is not None and str(file.parent) not in sys.path:
        # As for a worker, which imports handlers from its working directory.
        monkeypatch.setattr(sys, "path", [*sys.path, str(file.parent)])
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", broker.address)
    yield broker
    broker.close()


def _project_file(request: pytest.FixtureRequest) -> Path | None:
    name, root = str(request.config.getini(_OPTION)), request.config.rootpath
    if not name:
        return None
    directories = [directory for directory in request.path.parents if directory == root or root in directory.parents]
    return next((directory / name for directory in [*directories, root] if (directory / name).is_file()), None)


def _broker_of(file: Path) -> Broker:
    """Return a broker with the tables of a file, except its schedules, which would send in every test."""
    import tomllib

    from marq.testing.broker import Broker
    from marq.wire.errors import ConfigError

    try:
        document: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        for name in ("queues", "defaults", "settings"):
            if not isinstance(document.get(name, {}), dict):
                raise ConfigError(f"expected a table [{name}], not {document[name]!r}")
        broker = Broker(**{name: document[name] for name in ("queues", "defaults", "settings") if name in document})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from error
    for topic in {table["topic"] for table in document.get("queues", {}).values() if "topic" in table}:
        broker.create_topic(topic)
    return broker
