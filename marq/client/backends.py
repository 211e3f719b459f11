"""Brokers other than Kafka, which register themselves under the scheme of their addresses.

This way, production services never load :mod:`marq.testing`, and clients do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError


class Backend(NamedTuple):
    """The parts that clients open at an address, each made from the settings of one client."""

    #: A :class:`marq.backend.cluster.Cluster`.
    cluster: Callable[[ClientSettings], Any]
    #: A :class:`marq.queues.definition_log.DefinitionLog`.
    definition_log: Callable[[ClientSettings], Any]
    #: A :class:`marq.dead_letters.log.DeadLetterLog`.
    dead_letter_log: Callable[[ClientSettings], Any]


_backends: dict[str, Backend] = {}


def register(scheme: str, backend: Backend) -> None:
    """Serve all addresses that begin with ``scheme``, such as ``memory://``."""
    _backends[scheme] = backend


def backend_of(settings: ClientSettings) -> Backend | None:
    """Return the backend of the settings' address, or None for Kafka. Raises ConfigError."""
    scheme, separator, _ = settings.bootstrap_servers.partition("://")
    if not separator:
        return None
    try:
        return _backends[scheme + separator]
    except KeyError:
        raise ConfigError(
            f"bootstrap_servers={settings.bootstrap_servers!r}: {scheme}:// addresses have no broker in this"
            " process; tests create one first, with marq.testing.Broker"
        ) from None


def require_kafka(settings: ClientSettings, call: str, advice: str) -> None:
    """Check that a call is made to Kafka. Raises ConfigError if the address is that of another backend."""
    if backend_of(settings) is not None:
        raise ConfigError(f"{call}: works with Kafka only, and {settings.bootstrap_servers} is not; {advice}")
