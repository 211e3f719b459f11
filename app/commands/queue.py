"""``faust -A app queue NAME``: the settings of a queue, where each comes from, and their changes at run time."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import click
import faust

from agents.consumer_watch import has_no_consumer
from app.commands.command import command, confirm
from app.commands.figures import Open, told_by_workers
from app.commands.words import span
from marq.core.definitions import LAYERS, Definitions, layer_key
from marq.core.errors import ConfigError
from marq.core.names import Names, check_queue_name
from marq.core.queue import ALL, CHECKS, NAME_KEYS, UNLIMITED, check_document, settings_document
from marq.queues import Queues
from marq.topics import ensure_topics

#: What the layers are called for people.
ORIGINS = {
    "": "default",
    "defaults": "[defaults] of queues.toml",
    "handler": "the handler's code",
    "file": "queues.toml",
    "change": "changed at run time",
}
#: Changes of these decide who reads the queue.
_ASKED = frozenset(NAME_KEYS)


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE",
            help="Change a setting for all workers and clients, at once; VALUE as in queues.toml. Repeatable.",
        ),
        click.option(
            "--unset", "unset", multiple=True, metavar="KEY",
            help="Take back what --set changed, so that queues.toml counts again. Repeatable.",
        ),
        click.option("--reset", is_flag=True, help="Take back all that --set changed."),
        click.option(
            "--forget", is_flag=True,
            help="Take away all that is said of the queue; workers that define it say it again at their next start.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Show the settings as JSON."),
        click.option("--yes", is_flag=True, help="Do not ask."),
    )  # fmt: skip
    async def queue(
        self: Any,
        name: str,
        assignments: Sequence[str],
        unset: Sequence[str],
        reset: bool,
        forget: bool,
        as_json: bool,
        yes: bool,
    ) -> None:
        """Show the settings of a queue, and change them at run time."""
        check_queue_name(name)
        changes = read_changes(assignments, unset)
        if (reset, forget, bool(changes)).count(True) > 1:
            raise ConfigError("--set and --unset, --reset, --forget: each is an answer of its own; give one")
        client = self.app.client
        await ensure_topics(client)
        async with Queues.of(client) as queues:
            if forget:
                confirm(f"Forget all that is said of queue {name!r}?", yes=yes)
                await _forget(queues, name)
            elif reset:
                confirm(f"Take back all changes of queue {name!r} that were made at run time?", yes=yes)
                await queues.reset(name)
            elif changes:
                asked = sorted(_ASKED & changes.keys())
                if asked:
                    confirm(f"{', '.join(asked)}: another group may read queue {name!r} from now on. Go on?", yes=yes)
                await queues.change(name, **changes)
            shown = described(name, queues.definitions, client.names)
            if not (forget or reset or changes):
                shown["messages"] = messages(name, await told_by_workers(client))
        print(json.dumps(shown) if as_json else "\n".join(lines(shown)))


def read_changes(assignments: Sequence[str], unset: Sequence[str]) -> dict[str, Any]:
    """Return what the options say, None for keys that are taken back.

    Raises:
        ConfigError: an assignment can't be read, or a key is unknown or named twice.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, as in --set lease=60")
        _once(changes, key.strip(), "--set")
        changes[key.strip()] = _value(key.strip(), text.strip())
    check_document(changes, "--set")
    for key in unset:
        if key not in CHECKS:
            raise ConfigError(f"--unset {key}: unknown key; expected one of {', '.join(CHECKS)}")
        _once(changes, key, "--unset")
        changes[key] = None
    return changes


def _once(changes: Mapping[str, Any], key: str, option: str) -> None:
    if key in changes:
        raise ConfigError(f"{option} {key}: the key is named twice")


def _value(key: str, text: str) -> Any:
    if text in (UNLIMITED, ALL) or (key in NAME_KEYS and not text.startswith(("'", '"'))):
        # A name, without the quotes that the shell takes away anyhow.
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--set {key}={text}: the value can't be read as in queues.toml: {error}") from error
    if len(document) > 1:
        raise ConfigError(f"--set {key}={text}: expected one value")
    return document["value"]


async def _forget(queues: Queues, name: str) -> None:
    said = [layer for layer in LAYERS if queues.definitions.layer(layer, name) is not None]
    await queues.publish({layer_key(layer, name): None for layer in said})


def described(name: str, definitions: Definitions, names: Names) -> dict[str, Any]:
    """Return the settings of a queue with their origins, for programs."""
    group, placement = definitions.group(name), definitions.placement(name)
    return {
        "queue": name,
        "defined": name in definitions.names(),
        "group": group,
        "consumer_group": names.group(name) if group is None else names.named_group(group),
        "partitions": {"sent_to": placement.sends or ALL, "read": placement.reads or ALL},
        "settings": {
            key: {"value": value, "from": definitions.origin(name, key) or "default"}
            for key, value in settings_document(definitions.settings(name)).items()
        },
    }


def messages(name: str, told: Open) -> dict[str, Any] | None:
    """Return the figures of a queue's messages from workers, None if they do not count waiting messages."""
    if not told.census:
        return None
    figures = told.queues.get(name, {})
    return {
        "waiting": int(figures.get("waiting", 0)),
        "oldest_waiting_seconds": figures.get("oldest_waiting_seconds") or None,
        **told.of(name),
        "no_consumer": has_no_consumer(figures),
    }


def _messages(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "  messages: unknown, because no worker counts them; to count them: faust -A app queues"
    oldest_s = found["oldest_waiting_seconds"]
    oldest = "" if oldest_s is None else f", the oldest for {span(oldest_s)}"
    delayed = found["waiting_for_delivery"] + found["waiting_for_redelivery"]
    consumer = "; NO CONSUMER" if found["no_consumer"] else ""
    open_ = f"{found['in_flight']:,} in flight; {delayed:,} delayed"
    return f"  messages: {found['waiting']:,} waiting{oldest}; {open_}{consumer}"


def lines(shown: Mapping[str, Any]) -> list[str]:
    """Return the same for people."""
    group = "a group of its own" if shown["group"] is None else f"group {shown['group']}"
    undefined = "" if shown["defined"] else "; nobody has defined it"
    values = {key: _toml(each["value"]) for key, each in shown["settings"].items()}
    width = max(map(len, values.values()))
    partitions = shown["partitions"]
    return [
        f"queue {shown['queue']}: {group} ({shown['consumer_group']}){undefined}",
        *([] if partitions == {"sent_to": ALL, "read": ALL} else [_on(**partitions)]),
        *([_messages(shown["messages"])] if "messages" in shown else []),
        *(
            f"  {key:<12}  {values[key]:<{width}}  {ORIGINS.get(each['from'], each['from'])}"
            for key, each in shown["settings"].items()
        ),
    ]


def _on(sent_to: Any, read: Any) -> str:
    sent = "all partitions" if sent_to == ALL else f"partitions {', '.join(map(str, sent_to))}"
    also = "" if read == sent_to else f"; still read in {'all' if read == ALL else ', '.join(map(str, read))}"
    return f"  messages are sent to {sent}{also}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        said = [f"{key if key.isidentifier() else json.dumps(key)} = {_toml(each)}" for key, each in value.items()]
        return "{ " + ", ".join(said) + " }" if said else "{}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
