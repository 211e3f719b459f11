"""The keys file of the SQS endpoint: which access keys exist, and which calls each may make on which queues.

.. code-block:: toml

    [keys.ORDERS]
    secret_file = "orders.secret"       # or: secret = "..."
    allow = [{ queues = "orders-*", actions = ["send", "receive"] }]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from marq.wire.errors import ConfigError
from marq_worker.sqs.characters import is_queue_name

Action = Literal["send", "receive", "manage"]
#: The action of read-only calls; a key may make them on every queue for which it has any action.
DESCRIBE = "describe"
MIN_SECRET = 16
_ID = re.compile(r"[A-Za-z0-9_-]{3,128}")

_ACTIONS = {
    **dict.fromkeys(("SendMessage", "SendMessageBatch"), "send"),
    **dict.fromkeys(
        (
            "ReceiveMessage",
            "DeleteMessage",
            "DeleteMessageBatch",
            "ChangeMessageVisibility",
            "ChangeMessageVisibilityBatch",
        ),
        "receive",
    ),
    **dict.fromkeys(
        (
            "GetQueueAttributes",
            "GetQueueUrl",
            "ListDeadLetterSourceQueues",
            "ListMessageMoveTasks",
            "ListQueueTags",
            "ListQueues",
        ),
        DESCRIBE,
    ),
}


def action_of(operation: str) -> str:
    """Return the action that a key needs for an operation: ``send``, ``receive``, ``manage`` or ``describe``."""
    return _ACTIONS.get(operation, "manage")


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class Grant(_StrictModel):
    """Actions on the queues that a pattern names; ``*`` stands for any text."""

    queues: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.*-]{1,200}$")]
    actions: Annotated[list[Action], Field(min_length=1)]

    def covers(self, queue: str) -> bool:
        # An invalid name may be so long that matching it would take seconds.
        return is_queue_name(queue) and fnmatchcase(queue, self.queues)


@dataclass(frozen=True, slots=True)
class Key:
    """An access key."""

    id: str
    secret: str = field(repr=False)
    grants: Sequence[Grant]

    def allows(self, action: str, queue: str) -> bool:
        """Return whether the key may perform the action (:func:`action_of`) on the queue."""
        return any((action == DESCRIBE or action in grant.actions) and grant.covers(queue) for grant in self.grants)


def load_keys(path: Path) -> dict[str, Key]:
    """Read a keys file; return the keys by access key id.

    Raises ConfigError, which names the file and the key and never shows a secret.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: the keys file can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        # The error holds the text of the file.
        raise ConfigError(f"{path} is not valid TOML: it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    tables = document.get("keys")
    if set(document) != {"keys"} or not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{path}: expected one table [keys.ACCESSKEYID] for each key, and nothing else")
    return {key_id: _key(path, key_id, table) for key_id, table in tables.items()}


# --- one key ----------------------------------------------------------------------------------------------------------


class _Key(_StrictModel):
    secret: SecretStr | None = None
    secret_file: str | None = None
    allow: Annotated[list[Grant], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.secret is None) is (self.secret_file is None):
            raise ValueError("expected either secret or secret_file")
        return self


def _key(path: Path, key_id: str, table: Any) -> Key:
    where = f"{path}: [keys.{key_id}]"
    if _ID.fullmatch(key_id) is None:
        raise ConfigError(f"{where}: expected an access key id of 3 to 128 of A-Z a-z 0-9 _ -")
    try:
        key = _Key.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None
    secret = _secret_of_file(path, key.secret_file, where) if key.secret is None else key.secret.get_secret_value()
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"{where}: the secret is too short: at least {MIN_SECRET} characters")
    return Key(key_id, secret, key.allow)


def _secret_of_file(path: Path, name: str | None, where: str) -> str:
    # Relative to the keys file, so that both can be mounted anywhere.
    file = path.parent / (name or "")
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{where}: secret_file {file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: secret_file {file} is not UTF-8") from None


def _explain(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc']))}{': ' if mistake['loc'] else ''}"
        f"{mistake['msg'].removeprefix('Value error, ')}"
        for mistake in mistakes
    )
