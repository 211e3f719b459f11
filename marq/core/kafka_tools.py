"""Command lines of Kafka's own scripts, as an administrator types them: what our advice consists of."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The file that an administrator logs in with, where the cluster wants a login.
COMMAND_CONFIG = "admin.properties"


@dataclass(frozen=True, slots=True)
class Tools:
    """``servers`` is the cluster's address; ``secured``: whether it wants a login or TLS."""

    servers: str
    secured: bool = False

    def create_topic(self, name: str, partitions: int, copies: int, config: Mapping[str, str]) -> str:
        """Return the command that makes a topic."""
        settings = [part for setting, value in config.items() for part in ("--config", f"{setting}={value}")]
        size = ["--partitions", str(partitions), "--replication-factor", str(copies)]
        return self._line("kafka-topics.sh", "--create", "--topic", name, *size, *settings)

    def alter_topic(self, name: str, setting: str, value: str) -> str:
        """Return the command that changes one setting of a topic."""
        what = ["--entity-type", "topics", "--entity-name", name]
        return self._line("kafka-configs.sh", "--alter", *what, "--add-config", f"{setting}={value}")

    def add_partitions(self, name: str, partitions: int) -> str:
        """Return the command that lets a topic have so many partitions."""
        return self._line("kafka-topics.sh", "--alter", "--topic", name, "--partitions", str(partitions))

    def allow(self, principal: str, operations: Sequence[str], resource: Sequence[str], *, prefixed: bool) -> str:
        """Return the command that allows operations; ``resource`` is such as ("--topic", "marq.messages")."""
        allowed = [part for operation in operations for part in ("--operation", operation)]
        pattern = ["--resource-pattern-type", "prefixed"] if prefixed else []
        return self._line("kafka-acls.sh", "--add", "--allow-principal", principal, *allowed, *resource, *pattern)

    def _line(self, tool: str, *options: str) -> str:
        login = ["--command-config", COMMAND_CONFIG] if self.secured else []
        return shlex.join([tool, "--bootstrap-server", self.servers, *login, *options])
