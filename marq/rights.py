"""What to say when the broker refuses for want of a right: which one, and the command that grants it."""

from __future__ import annotations

from collections.abc import Iterable

from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from marq.core.errors import Forbidden
from marq.core.kafka_tools import Tools
from marq.core.names import Names
from marq.core.rights import Kind, Right, grants
from marq.settings import ClientSettings


def principal(settings: ClientSettings) -> str:
    """Return who we are for the broker, as far as the settings tell; a certificate may say something else."""
    return f"User:{settings.sasl_username or 'ANONYMOUS'}"


def tools(settings: ClientSettings) -> Tools:
    """Return how an administrator's commands reach the same cluster."""
    return Tools(settings.bootstrap_servers, settings.security_protocol != "PLAINTEXT")


def missing_right(settings: ClientSettings, operation: str, topic: str) -> Forbidden:
    """Return the error for a right on a topic that this client's principal does not have."""
    return missing_rights(settings, [Right(Kind.TOPIC, topic, operation)])


def missing_rights(settings: ClientSettings, rights: Iterable[Right]) -> Forbidden:
    """Return the error for rights that this client's principal does not have."""
    wanted = sorted(set(rights))
    lines = grants(wanted, principal(settings), tools(settings))
    return Forbidden(
        f"{principal(settings)} has no right to {', '.join(map(str, wanted))} at {settings.bootstrap_servers}. An"
        f" administrator grants it with:{_commands(lines)}\n(`faust -A app check` finds all that is missing)"
    )


def refused(
    settings: ClientSettings, error: BaseException, operation: str = "Describe", topic: str | None = None
) -> Forbidden | None:
    """Return what a broker's refusal means, None for any other error; ``operation`` on ``topic`` was tried."""
    right = _right(settings.names, error, operation, topic)
    return None if right is None else missing_rights(settings, [right])


def _right(names: Names, error: BaseException, operation: str, topic: str | None) -> Right | None:
    found = _named(error)
    if isinstance(error, GroupAuthorizationFailedError):
        return Right(Kind.GROUP, found or names.named_group(""), "Read", prefixed=not found)
    if isinstance(error, TransactionalIdAuthorizationFailed):
        ids = names.start_ids if found.startswith(names.start_ids) else names.transactional_ids
        return Right(Kind.TRANSACTIONAL_ID, ids, "Write", prefixed=True)
    if isinstance(error, TopicAuthorizationFailedError):
        return Right(Kind.TOPIC, topic or found or names.messages, operation)
    if isinstance(error, ClusterAuthorizationFailedError):
        # An idempotent producer may begin if it may write to any topic; brokers before 2.8 always want this one.
        return Right(Kind.TOPIC, topic, "Write") if topic else Right(Kind.CLUSTER, "kafka-cluster", "IdempotentWrite")
    return None


def _named(error: BaseException) -> str:
    """Return what aiokafka says is forbidden: a name, a set of names, or nothing."""
    subject = error.args[0] if error.args else ""
    if isinstance(subject, set | frozenset | list | tuple):
        subject = next(iter(sorted(subject)), "")
    return subject if isinstance(subject, str) else ""


def _commands(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)
