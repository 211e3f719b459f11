"""Which queues a consumer serves, and in which consumer group: one queue has one group.

Two groups on one queue would each receive all messages, but the tracker knows only one lease per message: the first
group's ack would acknowledge the second group's work. To process each message twice, send it to two queues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from marq.backend.cluster import Cluster
from marq.kafka.queue_positions import check_room
from marq.kafka.queue_records import Serving, serving
from marq.kafka.topics import Topics
from marq.settings.default_group import HANDLERS_GROUP
from marq.settings.definitions import Definitions
from marq.settings.removed_handlers import EXPIRY_S
from marq.wire.errors import ConfigError
from marq.wire.names import Names, check_group_name, check_queue_name

_TWICE = "To process each message twice, send it to two queues: producer.send([{0!r}, {1!r}], …)"

#: Raises ConfigError if some queues can't be served.
Check = Callable[[Collection[str]], object]


class Membership:
    """The queue or group of a consumer.

    Raises:
        ConfigError: both or neither are given, or a name is not allowed.
    """

    def __init__(self, queue: str | None, group: str | None) -> None:
        if queue is not None and group is not None:
            raise ConfigError(
                f"Consumer(queue={queue!r}, group={group!r}): expected one of them. A queue's group is in its settings"
                f" (`group` in marq.toml, or Queues.change({queue!r}, group=…)); Consumer(group={group!r}) then"
                " serves all queues of the group"
            )
        self.queue = queue
        if queue is not None:
            self.name = check_queue_name(queue)
        elif group is not None:
            self.name = check_group_name(group)
        else:
            raise ConfigError(
                "Consumer(): expected a queue's name, Consumer('emails'), or a group's, Consumer(group=…)"
            )

    def __str__(self) -> str:
        return f"{'group' if self.queue is None else 'queue'} {self.name!r}"

    def queues(self, definitions: Definitions) -> list[str]:
        """Return the queues to serve now."""
        return [self.queue] if self.queue is not None else definitions.queues_of(self.name)

    async def plan(
        self,
        cluster: Cluster,
        names: Names,
        topics: Topics,
        definitions: Definitions,
        served: Mapping[str, str],
        checks: Iterable[Check] = (),
    ) -> tuple[Serving, dict[str, str]]:
        """Return what to read now, and which queues of a group can't be served, and why.

        Own topics are looked up before they are read, except those in ``served``.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
            ConfigError: no queue fits, the queue belongs to a group of several queues, or the group is too large.
        """
        looked_up, unreadable = dict[str, str](), dict[str, str]()
        while True:
            unfit = self._unfit(definitions, checks)
            own_topics = self._serving(names, definitions, without=unfit).own_topics
            new = {queue: topic for queue, topic in own_topics.items() if served.get(queue) != topic}
            if looked_up or not new:
                # The definitions may have changed during the look-up. Topics that are new since then follow with that
                # change. Looking them up here, too, would hold up all other queues while definitions keep changing.
                late = {queue for queue, _ in new.items() - looked_up.items()}
                refused = unfit | {queue: why for queue, why in unreadable.items() if queue in new.keys() - late}
                return self._serving(names, definitions, without=late | refused.keys()), refused
            looked_up, unreadable = new, await _unreadable(cluster, topics, new)

    def _unfit(self, definitions: Definitions, checks: Iterable[Check]) -> dict[str, str]:
        """Return which queues of a group can't be served, and why: they must not stop the group's other queues.

        Raises:
            ConfigError: none of the queues can be served.
        """
        queues, unfit = self.queues(definitions), dict[str, str]()
        for queue in queues:
            try:
                _refuse_handled(queue, definitions)
                for check in checks:
                    check([queue])
            except ConfigError as error:
                unfit[queue] = str(error)
        if queues and len(unfit) == len(queues):
            raise ConfigError(unfit[queues[0]])
        return unfit

    def _serving(self, names: Names, definitions: Definitions, without: Collection[str]) -> Serving:
        """Return what to read without some queues."""
        queues = [queue for queue in self.queues(definitions) if queue not in without]
        # Before anything is acquired: messages that can't be committed would use up their attempts without being
        # delivered.
        check_room(self.name, queues)
        if self.queue is not None:
            self._refuse_part_of_group(self.queue, definitions)
        topics = {queue: definitions.settings(queue).topic for queue in queues}
        reads = {queue: definitions.placement(queue).reads for queue in queues}
        ordered = any(definitions.settings(queue).by_key for queue in queues)
        changed_at, skipped = definitions.changed_at(queues), definitions.skipped
        return serving(names.messages, queues, topics, reads, changed_at, skipped, ordered=ordered)

    def refuse_empty(self, definitions: Definitions) -> None:
        """Raise ConfigError if no queue's settings name the group."""
        if not self.queues(definitions):
            groups = sorted({group for queue in definitions.names() if (group := definitions.group(queue))})
            raise ConfigError(
                f"group {self.name!r}: no queue's settings name it (groups that queues name:"
                f' {", ".join(map(repr, groups)) or "none"}). Give a queue this group: `group = "{self.name}"` in'
                f" marq.toml, or Queues.change('emails', group={self.name!r})"
            )

    def kafka_group(self, names: Names, definitions: Definitions) -> str:
        """Return the Kafka consumer group to read in."""
        if self.queue is None:
            return names.named_group(self.name)
        group = definitions.group(self.queue)
        return names.group(self.queue) if group is None else names.named_group(group)

    def _refuse_part_of_group(self, queue: str, definitions: Definitions) -> None:
        group = definitions.group(queue)
        others = [] if group is None else [other for other in definitions.queues_of(group) if other != queue]
        if others:
            raise ConfigError(
                f"queue {queue!r} belongs to group {group!r} together with {', '.join(map(repr, others))}, and a"
                f" consumer serves a group as a whole: use Consumer(group={group!r}), or remove `group` from the"
                f" queue's settings. {_TWICE.format(queue, queue + '-2')}"
            )


async def _unreadable(cluster: Cluster, topics: Topics, own_topics: Mapping[str, str]) -> dict[str, str]:
    """Return which of these queues have own topics that can't be read, and why.

    Raises:
        BrokerUnavailable: no broker answered in time, or it refused.
    """
    try:
        await cluster.own_topics(own_topics.values(), topics)
    except ConfigError as error:
        if len(own_topics) == 1:
            return dict.fromkeys(own_topics, str(error))
        parts = [await _unreadable(cluster, topics, {queue: topic}) for queue, topic in own_topics.items()]
        return {queue: reason for part in parts for queue, reason in part.items()}
    return {}


def _refuse_handled(queue: str, definitions: Definitions) -> None:
    settings = definitions.settings(queue)
    if settings.handler is not None:
        removed = (
            f" A handler that was removed from all workers expires after {EXPIRY_S / 60:.0f} min, or with `marq"
            f" queue {queue} --forget`."
            if definitions.origin(queue, "handler") == "handler"
            else ""
        )
        raise ConfigError(
            f"queue {queue!r} has the handler {settings.handler!r}, which workers run (group"
            f" {definitions.group(queue) or HANDLERS_GROUP!r}): remove the handler from its settings (`marq queue"
            f" {queue}` shows where it comes from) before a consumer serves it.{removed}"
            f" {_TWICE.format(queue, queue + '-2')}"
        )
