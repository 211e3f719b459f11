"""The keys file: what it allows, and errors that name the key and never show a secret."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from marq.wire.errors import ConfigError
from marq_worker.sqs.access_keys import Grant, Key, action_of, load_keys
from marq_worker.sqs.aws_json import operations

SECRET = "wJalrXUtnFEMI-very-secret"
ALLOW = 'allow = [{ queues = "orders-*", actions = ["send"] }]'
WriteKeys = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteKeys:
    def write_keys(text: str) -> Path:
        path = tmp_path / "keys.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_keys


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    # As a log would show it, with all causes.
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_keys_have_secrets_and_grants(write: WriteKeys, tmp_path: Path) -> None:
    (tmp_path / "mailer.secret").write_text(f"{SECRET}\n")

    keys = load_keys(
        write("""
            [keys.ORDERS]
            secret = "another-secret-of-orders"
            allow = [
                { queues = "orders-*", actions = ["send", "receive"] },
                { queues = "audit", actions = ["send"] },
            ]

            [keys.MAILER]
            secret_file = "mailer.secret"
            allow = [{ queues = "*", actions = ["manage"] }]
        """)
    )

    assert keys == {
        "ORDERS": Key(
            "ORDERS",
            "another-secret-of-orders",
            [Grant(queues="orders-*", actions=["send", "receive"]), Grant(queues="audit", actions=["send"])],
        ),
        "MAILER": Key("MAILER", SECRET, [Grant(queues="*", actions=["manage"])]),
    }


def test_a_secret_file_may_be_anywhere(write: WriteKeys, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("secrets") / "key"
    file.write_text(SECRET)

    assert load_keys(write(f'[keys.ABC]\nsecret_file = "{file}"\n{ALLOW}'))["ABC"].secret == SECRET


def test_a_key_does_not_show_its_secret() -> None:
    key = Key("ORDERS", SECRET, ())

    assert SECRET not in repr(key)
    assert SECRET not in f"{key} {[key]} {key!r}"


@pytest.mark.parametrize(
    ("action", "queue", "allowed"),
    [
        ("send", "orders-eu", True),
        ("send", "orders-", True),
        ("send", "orders", False),
        ("send", "xorders-eu", False),
        ("send", "orders-eu\n", False),
        ("receive", "orders-eu", False),
        ("manage", "orders-eu", False),
        ("describe", "orders-eu", True),
        ("describe", "orders", False),
        ("receive", "a.fifo", True),
        ("receive", "axfifo", False),
        ("send", "a.fifo", False),
        ("describe", "a.fifo", True),
        ("send", "us-invoices-2", True),
        ("send", "us-invoices", False),
        ("send", "-invoices-" * 100_000 + "\n", False),
    ],
)
def test_a_grant_is_for_actions_on_queues(action: str, queue: str, allowed: bool) -> None:
    key = Key(
        "K",
        SECRET,
        (
            Grant(queues="orders-*", actions=["send"]),
            Grant(queues="a.fifo", actions=["receive"]),
            Grant(queues="*-invoices-*", actions=["send"]),
        ),
    )

    assert key.allows(action, queue) is allowed


def test_every_operation_needs_an_action() -> None:
    actions = {
        "send": {"SendMessage", "SendMessageBatch"},
        "receive": {
            "ReceiveMessage",
            "DeleteMessage",
            "DeleteMessageBatch",
            "ChangeMessageVisibility",
            "ChangeMessageVisibilityBatch",
        },
        "describe": {
            "GetQueueAttributes",
            "GetQueueUrl",
            "ListDeadLetterSourceQueues",
            "ListMessageMoveTasks",
            "ListQueueTags",
            "ListQueues",
        },
        "manage": {
            "AddPermission",
            "CancelMessageMoveTask",
            "CreateQueue",
            "DeleteQueue",
            "PurgeQueue",
            "RemovePermission",
            "SetQueueAttributes",
            "StartMessageMoveTask",
            "TagQueue",
            "UntagQueue",
        },
    }

    assert {action: {name for name in operations() if action_of(name) == action} for action in actions} == actions
    assert action_of("AnOperationOfNextYear") == "manage"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys", "is not valid TOML"),
        ("", "expected one table [keys.ACCESSKEYID] for each key"),
        ("keys = 1", "expected one table [keys.ACCESSKEYID] for each key"),
        ("[keys]", "expected one table [keys.ACCESSKEYID] for each key"),
        (f'[keys.ABC]\nsecret = "{SECRET}"\n{ALLOW}\n[other]\nx = 1', "and nothing else"),
        (f'[keys]\nABC = "{SECRET}"', "[keys.ABC]: Input should be a valid dictionary"),
        (f'[keys.AB]\nsecret = "{SECRET}"\n{ALLOW}', "[keys.AB]: expected an access key id of 3 to 128"),
        (f'[keys."A/B"]\nsecret = "{SECRET}"\n{ALLOW}', "[keys.A/B]: expected an access key id"),
        (f"[keys.ABC]\n{ALLOW}", "[keys.ABC]: expected either secret or secret_file"),
        (f'[keys.ABC]\nsecret = "{SECRET}"\nsecret_file = "x"\n{ALLOW}', "expected either secret or secret_file"),
        (f'[keys.ABC]\nsecret = ["{SECRET}"]\n{ALLOW}', "[keys.ABC]: secret: Input should be a valid string"),
        (f'[keys.ABC]\nsecrets = "{SECRET}"\n{ALLOW}', "[keys.ABC]: secrets: Extra inputs are not permitted"),
        (f'[keys.ABC]\nsecret = "{SECRET[:15]}"\n{ALLOW}', "[keys.ABC]: the secret is too short: at least 16"),
        (f'[keys.ABC]\nsecret = "{SECRET}"', "[keys.ABC]: allow: Field required"),
        (f'[keys.ABC]\nsecret = "{SECRET}"\nallow = []', "[keys.ABC]: allow: List should have at least 1 item"),
        (
            f'[keys.ABC]\nsecret = "{SECRET}"\nallow = [{{ queues = "a", actions = ["read"] }}]',
            "[keys.ABC]: allow.0.actions.0: Input should be 'send', 'receive' or 'manage'",
        ),
        (
            f'[keys.ABC]\nsecret = "{SECRET}"\nallow = [{{ queues = "a", actions = [] }}]',
            "[keys.ABC]: allow.0.actions: List should have at least 1 item",
        ),
        (
            f'[keys.ABC]\nsecret = "{SECRET}"\nallow = [{{ queues = "a[b]", actions = ["send"] }}]',
            "[keys.ABC]: allow.0.queues: String should match pattern",
        ),
        (f'[keys.ABC]\nsecret_file = "none"\n{ALLOW}', "none can't be read: No such file or directory"),
        (f'[keys.ABC]\nsecret_file = ""\n{ALLOW}', "can't be read: Is a directory"),
    ],
)
def test_a_file_of_another_form_is_refused_with_file_and_key(write: WriteKeys, text: str, message: str) -> None:
    path = write(text)

    error = refused(path)

    assert error.startswith(str(path))
    assert message in error


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.toml").endswith("none.toml: the keys file can't be read: No such file or directory")


def test_files_that_are_not_utf_8_are_named_without_their_content(write: WriteKeys, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET.encode() + b"\xff")
    path = write(f'[keys.ABC]\nsecret_file = "key"\n{ALLOW}')
    assert refused(path).endswith("key is not UTF-8")

    path.write_bytes(f'[keys.ABC]\nsecret = "{SECRET}'.encode() + b'\xff"')
    assert refused(path).endswith("is not valid TOML: it is not UTF-8")
