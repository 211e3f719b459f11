"""``marq queue NAME``, ``pause NAME`` and ``resume NAME``: settings of a queue and their changes."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import click

from marq.kafka.topics import ensure_topics
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.settings.combinations import ORIGINS
from marq.settings.definitions import LAYERS, layer_key
from marq.settings.effective_settings import EffectiveSettings, queue_document
from marq.settings.queue import ALL, CHECKS, MAX_SECONDS, check_document
from marq.wire.errors import ConfigError
from marq.wire.names import check_queue_name
from marq_worker import busy_keys
from marq_worker.backlog.consumer_watch import has_no_consumer
from marq_worker.commands.command import JSON, YES, Setup, command, open_queues
from marq_worker.commands.confirmation import confirm
from marq_worker.commands.open_messages import OpenReport, told_by_workers
from marq_worker.commands.terminal import Column, cell, quoted, seconds, show
from marq_worker.commands.unknown import note_if_unknown
from marq_worker.handlers.handler_watch import removed
from marq_worker.readable import paused, span
from marq_worker.setting_values import NAMED, read_value, write_value
from marq_worker.web.blocked_keys import merged_keys
from marq_worker.web.peers import ask_workers, path_segment


def _next_attempt(key: Mapping[str, Any]) -> str:
    return "(operator)" if key["waits_for_operator"] else span(key["due_in_seconds"])


def _first_waits(key: Mapping[str, Any]) -> str:
    sent_ms = key["first_sent_ms"]
    return "-" if sent_ms is None else span(max(0.0, time.time() - sent_ms / 1000))


_BLOCKED = (
    Column("blocked key", lambda key: quoted(key["key"]), least=12),
    Column("attempts", cell("attempt"), right=True),
    Column("next in", _next_attempt, right=True),
    Column("first message", cell("id"), rank=2),
    Column("error", cell("error"), least=20, rank=1),
)
_BUSY = (
    Column("key", lambda key: quoted(key["key"]), least=12),
    Column("waiting", cell("waiting"), right=True),
    Column("running", cell("running"), right=True),
    Column("at a limit", lambda key: "yes" if key["at_limit"] else "no"),
    Column("first waits for", _first_waits, right=True),
)
#: Blocked keys that a terminal shows.
_SHOWN_KEYS = 20


@command(click.argument("name"),
    click.option(
        "--set", "assignments", multiple=True, metavar="KEY=VALUE",
        help="Change a setting for all workers and clients; VALUE as in marq.toml; durations also 1h30m. Repeatable.",
    ),
    click.option(
        "--unset", "unset", multiple=True, metavar="KEY",
        help="Undo a change made with --set, so that marq.toml applies again. Repeatable.",
    ),
    click.option("--reset", is_flag=True, help="Undo all changes made with --set."),
    click.option(
        "--forget", is_flag=True,
        help="Remove the queue's definition; workers that define it publish it again at their next start.",
    ),
    JSON,
    YES,
)  # fmt: skip
async def queue(
    setup: Setup,
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
        raise ConfigError("--set and --unset, --reset, --forget: pass only one of them")
    client = setup.client
    async with open_queues(client) as queues:
        if forget:
            confirm(f"Forget the definition of queue {name!r}?", client, yes=yes)
            await _forget(queues, name)
        elif reset:
            confirm(f"Undo all run-time changes of queue {name!r}?", client, yes=yes)
            await queues.reset(name)
        elif changes:
            asked = sorted(NAMED & changes.keys())
            if asked:
                confirm(
                    f"{', '.join(asked)}: another group may read queue {name!r} from now on. Continue?", client, yes=yes
                )
            await queues.change(name, **changes)
        shown = queue_document(name, queues.definitions, client.names)
        if not (forget or reset or changes):
            told = await told_by_workers(client)
            shown["messages"] = messages(name, told)
            shown["removed_handler"] = told.removed_handlers.get(name)
            if queues.definitions.settings(name).ordered:
                shown["blocked_keys"] = await _ask_for_blocked(client, name, told)
            if queues.definitions.settings(name).limited:
                shown["keys"] = busy_keys.of_queue(name, told.answers)
    if as_json:
        print(json.dumps(shown))
        return
    print("\n".join(lines(shown)))
    if shown.get("blocked_keys") and shown["blocked_keys"]["first"]:
        print()
        show(_BLOCKED, shown["blocked_keys"]["first"][:_SHOWN_KEYS])
    if shown.get("keys") and shown["keys"]["busiest"]:
        print()
        show(_BUSY, shown["keys"]["busiest"])


def read_changes(assignments: Sequence[str], unset: Sequence[str]) -> dict[str, Any]:
    """Return the changes in the options, None for keys to unset."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, as in --set lease=60")
        _once(changes, key.strip(), "--set")
        changes[key.strip()] = read_value(key.strip(), text.strip(), "--set")
    check_document(changes, "--set")
    for key in unset:
        if key not in CHECKS:
            raise ConfigError(f"--unset {key}: unknown key; expected one of {', '.join(CHECKS)}")
        _once(changes, key, "--unset")
        changes[key] = None
    return changes


def _once(changes: Mapping[str, Any], key: str, option: str) -> None:
    if key in changes:
        raise ConfigError(f"{option} {key}: the key is given twice")


async def _forget(queues: Queues, name: str) -> None:
    layers = [layer for layer in LAYERS if queues.definitions.layer(layer, name) is not None]
    await queues.publish({layer_key(layer, name): None for layer in layers})


def messages(name: str, told: OpenReport) -> dict[str, Any] | None:
    """Return the metrics of a queue's messages, None if no worker counts waiting messages."""
    if not told.backlog:
        return None
    metrics = told.queues.get(name, {})
    return {
        "waiting": int(metrics.get("waiting", 0)),
        "oldest_waiting_seconds": metrics.get("oldest_waiting_seconds") or None,
        **told.of(name),
        "expired": int(metrics.get("messages_expired", 0)),
        "no_consumer": has_no_consumer(metrics),
    }


async def _ask_for_blocked(client: ClientSettings, name: str, told: OpenReport) -> dict[str, Any] | None:
    """Ask the workers how many keys of a queue are blocked, and for the first messages of those keys.

    None if no worker runs. ``complete``: whether all workers have answered.
    """
    if not told.workers:
        return None
    members, answers = await ask_workers(client, f"api/queues/{path_segment(name)}")
    return {
        "complete": told.complete and members.settled and None not in answers,
        "count": int(told.queues.get(name, {}).get("blocked_keys", 0)),
        "first": merged_keys([answer for answer in answers if answer is not None]),
    }


def _blocked(keys: Mapping[str, Any] | None) -> str:
    if keys is None:
        return "  blocked keys: unknown, because no worker runs; start one with marq worker"
    more = keys["count"] - _SHOWN_KEYS
    which = f"; {_SHOWN_KEYS} of them, with the most attempts, are below (--json has more)" if more > 0 else ""
    missing = "" if keys["complete"] else "; incomplete: a worker did not respond, or workers are joining and leaving"
    return f"  blocked keys: {keys['count']:,}{which}{missing}"


def _keys(keys: Mapping[str, Any]) -> str:
    busiest = "; the busiest are below" if keys["busiest"] else ""
    return f"  keys in the trackers' handlers: {keys['waiting']:,} wait, {keys['at_limit']:,} at a limit{busiest}"


def _messages(metrics: Mapping[str, Any] | None) -> str:
    if metrics is None:
        return "  messages: unknown, because no worker counts them or one did not respond; to count them: marq queues"
    oldest_s = metrics["oldest_waiting_seconds"]
    oldest = "" if oldest_s is None else f", the oldest for {span(oldest_s)}"
    delayed = metrics["waiting_for_delivery"] + metrics["waiting_for_redelivery"]
    consumer = "; NO CONSUMER" if metrics["no_consumer"] else ""
    open_ = f"{metrics['in_flight']:,} in flight; {delayed:,} delayed"
    expired = f"; {metrics['expired']:,} have expired" if metrics["expired"] else ""
    return f"  messages: {metrics['waiting']:,} waiting{oldest}; {open_}{expired}{consumer}"


def lines(shown: Mapping[str, Any]) -> list[str]:
    group = "a group of its own" if shown["group"] is None else f"group {shown['group']}"
    undefined = "" if shown["defined"] else "; not defined"
    project = f"; project {shown['project']}" if shown["project"] else ""
    values = {key: write_value(setting["value"]) for key, setting in shown["settings"].items()}
    key_width, width = max(map(len, values)), max(map(len, values.values()))
    partitions = shown["partitions"]
    return [
        f"queue {shown['queue']}: {group} ({shown['consumer_group']}){undefined}{project}",
        *([] if partitions == {"sent_to": ALL, "read": ALL} else [_on(**partitions)]),
        *([_messages(shown["messages"])] if "messages" in shown else []),
        *([_blocked(shown["blocked_keys"])] if "blocked_keys" in shown else []),
        *([_keys(shown["keys"])] if "keys" in shown else []),
        *([f"  {removed(shown['queue'], **shown['removed_handler'])}"] if shown.get("removed_handler") else []),
        *(
            f"  {key:<{key_width}}  {values[key]:<{width}}  {ORIGINS.get(setting['from'], setting['from'])}"
            for key, setting in shown["settings"].items()
        ),
    ]


def _on(sent_to: Any, read: Any) -> str:
    sent = "all partitions" if sent_to == ALL else f"partitions {', '.join(map(str, sent_to))}"
    also = "" if read == sent_to else f"; still read in {'all' if read == ALL else ', '.join(map(str, read))}"
    return f"  messages are sent to {sent}{also}"


_NAMES = click.argument("names", metavar="NAME...", nargs=-1, required=True)


@command(_NAMES,
    click.option("--for", "duration", metavar="DURATION", help="Resume automatically after DURATION: 10m, 1h30m."),
    JSON,
)  # fmt: skip
async def pause(setup: Setup, names: Sequence[str], duration: str | None, as_json: bool) -> None:
    """Pause queues: stop deliveries until `resume` or the end of --for; messages in flight continue."""
    duration_s = None if duration is None else seconds("--for", duration)
    if duration_s is not None and not 0 < duration_s <= MAX_SECONDS:
        raise ConfigError(f"--for {duration}: expected a duration above 0, to {span(MAX_SECONDS).replace(' ', '')}")
    await _switch(setup.client, names, as_json, lambda queues, name: queues.pause(name, duration_s))


@command(_NAMES, JSON)
async def resume(setup: Setup, names: Sequence[str], as_json: bool) -> None:
    """Resume paused queues."""
    await _switch(setup.client, names, as_json, Queues.resume)


async def _switch(
    client: ClientSettings,
    names: Sequence[str],
    as_json: bool,
    switch: Callable[[Queues, str], Awaitable[EffectiveSettings]],
) -> None:
    for name in names:
        check_queue_name(name)
    await ensure_topics(client)
    outcomes: list[dict[str, Any]] = []
    async with Queues.of(client) as queues:
        try:
            for name in dict.fromkeys(names):
                if name not in queues.definitions.names():
                    await note_if_unknown(client, name)
                before = queues[name].paused
                after = (await switch(queues, name)).paused
                until = after if isinstance(after, str) else None
                outcomes.append(
                    {"queue": name, "paused": bool(after), "paused_until": until, "changed": after != before}
                )
        finally:
            # Also if a later queue fails: the earlier ones were changed.
            if outcomes:
                _print_switched(outcomes, as_json=as_json)


def _print_switched(outcomes: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcomes))
        return
    for outcome in outcomes:
        until = "then or until `resume`" if outcome["paused_until"] else "`resume`"
        paused_now = f"{paused(outcome['paused_until'])}; no message is delivered until {until}"
        state = paused_now if outcome["paused"] else "delivers"
        print(f"queue {outcome['queue']}: {state}{'' if outcome['changed'] else ', as it was before'}")
