"""Settings that exclude each other, in one queue or in several.

Only writers check them. Readers accept any combination, so that the settings do not depend on the order of records.
"""

from __future__ import annotations

from marq.settings.definitions import Definitions
from marq.settings.durations import plain_seconds
from marq.settings.ordering_keys import ordering_error
from marq.settings.queue import LATEST, TURN_KEYS
from marq.wire.errors import ConfigError
from marq.wire.names import Names

#: The settings that each check compares.
LEASE_KEYS = frozenset({"lease", "max_lease"})
ORDERING_KEYS = frozenset(
    {"ordering", "on_dead_letter", "delivery", "delay", "dead_letter", "key", "expires_after", *TURN_KEYS}
)
TOPIC_KEYS = frozenset({"topic", "group", "handler"})
#: What the layers of a setting are called, by :meth:`Definitions.origin`.
ORIGINS = {
    "": "default",
    "defaults": "[defaults] of marq.toml",
    "handler": "the handler's code",
    "file": "marq.toml",
    "change": "changed at run time",
}


def check_combinations(definitions: Definitions) -> None:
    """Check the settings of all queues as :func:`check_queue` does, and the lease of queues without a definition."""
    for queue in definitions.names():
        check_queue(definitions, queue)
    defaults = definitions.default_settings
    if defaults.max_lease_ms < defaults.lease_ms:
        raise ConfigError(
            f"[defaults]: max_lease = {plain_seconds(defaults.max_lease_ms)} is shorter than"
            f" lease = {plain_seconds(defaults.lease_ms)}: raise max_lease, or shorten lease"
        )


def check_queue(definitions: Definitions, queue: str) -> None:
    """Check the lease, the ordering and the start of a queue. Raises ConfigError."""
    check_lease(definitions, queue)
    check_ordering(definitions, queue)
    # A change may remove the topic and leave the start, which other writers need not repair.
    if definitions.origin(queue, "start") != "change":
        check_start(definitions, queue)


def check_lease(definitions: Definitions, queue: str) -> None:
    """Check that a queue's ``max_lease`` is not shorter than its lease, for which a message is leased anyway."""
    settings = definitions.settings(queue)
    if settings.max_lease_ms < settings.lease_ms:
        lease, max_lease = [
            f"{key} = {plain_seconds(ms)} ({ORIGINS[definitions.origin(queue, key)]})"
            for key, ms in (("lease", settings.lease_ms), ("max_lease", settings.max_lease_ms))
        ]
        raise ConfigError(
            f"queue {queue!r}: {max_lease} is shorter than {lease}, but each message is leased for at least"
            " that long: raise max_lease, or shorten lease"
        )


def check_ordering(definitions: Definitions, queue: str) -> None:
    """Check that the settings of a queue allow its ordering."""
    if (error := ordering_error(definitions.settings(queue))) is not None:
        key, value, advice = error
        origin = definitions.origin(queue, key.partition(".")[0])
        raise ConfigError(f"queue {queue!r}: {key} = {value} ({ORIGINS[origin]}) {advice}")


def check_start(definitions: Definitions, queue: str) -> None:
    """Check that a queue that starts at the latest record has a topic."""
    settings = definitions.settings(queue)
    if settings.start == LATEST and settings.topic is None:
        raise ConfigError(
            f'queue {queue!r}: start = "{LATEST}" ({ORIGINS[definitions.origin(queue, "start")]}) has no effect without'
            " topic: set both or neither"
        )


def check_topic(definitions: Definitions, queue: str, names: Names) -> None:
    """Check that a queue's topic is not one of Marq's, and that no other queue of its consumer group names it.

    A consumer group reads each record once, so of two such queues only one would get it.
    """
    topic, group = definitions.settings(queue).topic, definitions.group(queue)
    if topic is None:
        return
    if names.is_own_topic(topic):
        raise ConfigError(
            f"queue {queue!r}: topic {topic!r} belongs to marq; a queue without a topic gets its messages from"
            f" {names.messages}"
        )
    others = [
        other for other in definitions.queues_of_topic(topic) if other != queue and definitions.group(other) == group
    ]
    if group is not None and others:
        raise ConfigError(
            f"queue {queue!r}: topic {topic!r} is also that of queue {others[0]!r} in the same group {group!r}, but a"
            f' group reads each record once: give one of the queues another group, as in group = "{queue}"'
        )
