"""The definitions of all queues: a fold over the queues topic, and the settings that result from its layers.

The topic is compacted. Each record is one layer of one queue or schedule, or the defaults of all queues:

* ``defaults``: the [defaults] of queues that no named project defines;
* ``defaults:PROJECT``: the [defaults] of the marq.toml of a project;
* ``handler:NAME``: the settings in a handler's decorator, from the workers that have its code;
* ``file:NAME``: a table of marq.toml;
* ``change:NAME``: changes at run time;
* ``placement:NAME``: the partitions of the messages topic for a queue (:mod:`marq.settings.placements`), from workers;
* ``purge:NAME``: the purged records of a queue (:mod:`marq.settings.skipped_records`);
* ``start:NAME``: the records of its topic that came before the queue (:mod:`marq.settings.skipped_records`);
* ``sqs:NAME``: data of a queue that only SQS clients use, or when it was deleted (marq_worker/sqs/sqs_queues.py);
* ``sqs-tasks:NAME``: tasks that endpoints carry out on a queue on behalf of SQS clients (marq_worker/sqs/tasks.py);
* ``quarantine:PARTITION/OFFSET``: a request to quarantine one marker record (:mod:`marq.wire.quarantines`);
* ``confirmed:NAME``: a worker that runs the decorated handler of the queue was alive
  (marq_worker/handlers/handler_watch.py);
* ``schedule-file:NAME``, ``schedule:NAME``: schedules (:mod:`marq.settings.schedule_definitions`), from the file and at
  run time;
* ``check``: never with a value.

The records that workers publish at their start (``defaults``, ``handler``, ``file`` and ``schedule-file``) name their
project in the key ``project``, if it has a name. A start changes and removes only the records of its own project
(marq_worker/publication.py): otherwise a worker started in the wrong directory would erase the settings of all others.

A record without a value removes its layer. The settings of a queue are the built-in defaults, overridden by these
layers in this order: the layer closest to the running system wins.

Unknown keys of a document are ignored, so that an older reader does not lose the whole layer of a newer writer, and
with it, for example, the queue's group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from marq.settings.default_group import group_of
from marq.settings.placements import EVERYWHERE, Placement
from marq.settings.queue import CHECKS, QueueSettings, check_defaults, check_document, queue_settings
from marq.settings.schedule_definitions import LAYERS as SCHEDULE_LAYERS
from marq.settings.schedule_definitions import ScheduleLayers, project_of
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import ConfigError
from marq.wire.names import Names, check_queue_name
from marq.wire.quarantines import Quarantine, read_place

#: Layers of one queue, weakest first.
LAYERS = ("handler", "file", "change")
#: The layers that workers publish at their start.
_PUBLISHED = ("handler", "file")
DEFAULTS_KEY = b"defaults"
_DEFAULTS = DEFAULTS_KEY.decode()
_PLACEMENT, _PURGE, _START, _QUARANTINE, _CONFIRMED = "placement", "purge", "start", "quarantine", "confirmed"
_SQS, _SQS_TASKS = "sqs", "sqs-tasks"
#: A record without a value, from which `marq check` learns the broker's time.
CHECK_KEY = b"check"


def layer_key(layer: str, name: str) -> bytes:
    """Return the key of a queue's or a schedule's layer in the queues topic."""
    return f"{layer}:{name}".encode()


def defaults_key(project: str) -> bytes:
    """Return the key of the [defaults] of a project; that of a project without a name has no name either."""
    return layer_key(_DEFAULTS, project) if project else DEFAULTS_KEY


placement_key = partial(layer_key, _PLACEMENT)
purge_key = partial(layer_key, _PURGE)
start_key = partial(layer_key, _START)
sqs_key = partial(layer_key, _SQS)
sqs_tasks_key = partial(layer_key, _SQS_TASKS)
confirmed_key = partial(layer_key, _CONFIRMED)


def quarantine_key(quarantine: Quarantine) -> bytes:
    return layer_key(_QUARANTINE, quarantine.place)


def _object(document: object) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise ConfigError(f"expected an object, not {document!r}")
    return document


#: The records about one queue that are not layers: how their documents are read.
_RECORDS: Mapping[str, Callable[[str, object], Any]] = {
    _PLACEMENT: lambda _, document: Placement.read(document),
    _PURGE: lambda _, document: SkippedRecords.read(document),
    _START: lambda _, document: SkippedRecords.read(document),
    _QUARANTINE: Quarantine.read,
    _CONFIRMED: lambda _, document: document,
    _SQS: lambda _, document: _object(document),
    _SQS_TASKS: lambda _, document: _object(document),
}


class Definitions:
    """The definitions; a call returns the settings of a queue, defined or not."""

    def __init__(self) -> None:
        self.schedules = ScheduleLayers()
        #: The layers of all queues by project; "" has those of queues that no named project defines.
        self._defaults: dict[str, dict[str, Any]] = {}
        #: The project that wrote the record ``defaults``, None if there is no such record.
        self.defaults_owner: str | None = None
        self._layers: dict[str, dict[str, dict[str, Any]]] = {}
        #: The project of each layer that a start has published, by queue, and of each queue.
        self._publishers: dict[str, dict[str, str]] = {}
        self._projects: dict[str, str | None] = {}
        #: The settings of queues without a definition. These are cached, because trackers ask for each message.
        self.default_settings = QueueSettings()
        self._settings: dict[str, QueueSettings] = {}
        #: The ends of pauses, by queue; None stands for queues without a definition.
        self._pause_ends: dict[str | None, int] = {}
        # Sorted queues by group, None after a change. Cached, because members ask for each batch of messages.
        self._by_group: dict[str, list[str]] | None = None
        #: Number of placements read so far, to notice a change.
        self.moves = 0
        self._moved: dict[str, int] = {}
        #: The content of the other records, by kind and queue; quarantine requests by partition and offset.
        self._records: dict[str, dict[Any, Any]] = {kind: {} for kind in _RECORDS}
        self._confirmations = 0
        self._changed_at: dict[str, int] = {}

    def fold(self, key: bytes | None, document: Mapping[str, Any] | None, offset: int = -1) -> str | None:
        """Fold one record of the queues topic; return the queue concerned, None for all or none.

        Raises ConfigError if the key or the document can't be understood; everything stays as it was.
        """
        if key == CHECK_KEY and document is None:
            return None
        self._by_group = None
        if key == DEFAULTS_KEY:
            self._fold_defaults("", document)
            self.defaults_owner = None if document is None else project_of(document)
            self.default_settings = queue_settings(self._defaults.get("", {}))
            self._note_pause(None, self.default_settings)
            return None
        layer, queue = _read_key(key)
        if layer == _DEFAULTS:
            self._fold_defaults(queue, document)
            return None
        if layer in SCHEDULE_LAYERS:
            self.schedules.fold(layer, queue, document)
            return None
        if layer in _RECORDS:
            try:
                self._note(layer, queue, document)
            except ConfigError as error:
                raise ConfigError(f"the record '{layer}:{queue}': {error}") from error
            return queue if layer in (_PLACEMENT, _PURGE, _START) else None
        if document is None:
            self._drop(layer, queue)
        else:
            checked = check_document(_known(document), f"the record '{layer}:{queue}'")
            self._layers[queue] = {**self._layers.get(queue, {}), layer: checked}
            if layer in _PUBLISHED:
                self._publishers[queue] = {**self._publishers.get(queue, {}), layer: project_of(document)}
            self._add_up(queue)
        self._changed_at[queue] = offset
        return queue

    def _fold_defaults(self, project: str, document: Mapping[str, Any] | None) -> None:
        defaults = check_defaults(_known(document), f"the record {defaults_key(project).decode()!r}")
        if document is None:
            self._defaults.pop(project, None)
        else:
            self._defaults[project] = defaults
        for queue in self._layers:
            self._add_up(queue)

    def settings(self, queue: str) -> QueueSettings:
        """Return the settings of a queue."""
        return self._settings.get(queue, self.default_settings)

    __call__ = settings

    def after(self, records: Mapping[bytes, Mapping[str, Any] | None]) -> Definitions:
        """Return a copy with further records folded in. Raises ConfigError."""
        later = copy.copy(self)
        # Layers are replaced, never changed, so both may share them.
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(later, name, dict(value))
        later._records = {kind: dict(content) for kind, content in self._records.items()}
        later.schedules = copy.deepcopy(self.schedules)
        for key, document in records.items():
            later.fold(key, document)
        return later

    @property
    def next_pause_end_ms(self) -> int | None:
        """When the next pause ends, in ms since 1970; None if no pause has an end."""
        return min(self._pause_ends.values(), default=None)

    def end_pauses(self, now_ms: int) -> bool:
        """Resume the queues whose pause has ended; return whether there are any.

        Call it after each :meth:`fold`, which knows no time, and at :attr:`next_pause_end_ms`.
        """
        ended = [queue for queue, end_ms in self._pause_ends.items() if end_ms <= now_ms]
        for queue in ended:
            del self._pause_ends[queue]
            if queue is None:
                self.default_settings = _resumed(self.default_settings)
            else:
                self._settings[queue] = _resumed(self._settings[queue])
        return bool(ended)

    def group(self, queue: str) -> str | None:
        """Return the named group of a queue, None for a group of its own."""
        return group_of(self.settings(queue), self.project(queue))

    def consumer_group(self, queue: str, names: Names) -> str:
        """Return the Kafka group that reads a queue."""
        named = self.group(queue)
        return names.group(queue) if named is None else names.named_group(named)

    def changed_at(self, queues: Iterable[str]) -> int:
        """Return the offset of the last record that changed settings of these queues, -1 if there is none.

        None of them has changed its group after it. Compaction may hide earlier records, but not the last one.
        """
        return max((self._changed_at.get(queue, -1) for queue in queues), default=-1)

    def queues_of(self, group: str) -> list[str]:
        """Return the queues of a named group, sorted."""
        if self._by_group is None:
            self._by_group = {}
            for queue in self.names():
                if (named := self.group(queue)) is not None:
                    self._by_group.setdefault(named, []).append(queue)
        return list(self._by_group.get(group, ()))

    def queues_of_topic(self, topic: str) -> list[str]:
        """Return the queues that name a topic, sorted."""
        return [queue for queue in self.names() if self.settings(queue).topic == topic]

    def owners_of_topics(self) -> dict[str, list[str]]:
        """Return the topics that queues name, each with its queues, sorted."""
        owners: dict[str, list[str]] = {}
        for queue in self.names():
            if (topic := self.settings(queue).topic) is not None:
                owners.setdefault(topic, []).append(queue)
        return owners

    def placement(self, queue: str) -> Placement:
        """Return the current placement of a queue."""
        return self._records[_PLACEMENT].get(queue) or EVERYWHERE

    def placed(self) -> list[str]:
        """Return all queues that have a placement or need one, sorted."""
        settings = {name: self.settings(name) for name in self._layers}
        return sorted(
            {
                *self._records[_PLACEMENT],
                *[
                    name
                    for name, queue_settings in settings.items()
                    if queue_settings.by_key or queue_settings.partitions is not None
                ],
            }
        )

    def purge(self, queue: str) -> SkippedRecords | None:
        """Return the purge of a queue, None if it was never purged."""
        return self._records[_PURGE].get(queue)

    def begin(self, queue: str) -> SkippedRecords | None:
        """Return which records of its topic came before a queue, None if all are the queue's."""
        return self._records[_START].get(queue)

    def skipped(self, queue: str) -> SkippedRecords | None:
        """Return which records of a queue are not delivered: purged ones, and those from before its start."""
        purge, begin = self.purge(queue), self.begin(queue)
        return begin if purge is None else purge if begin is None else purge.along_with(begin)

    def sqs(self, queue: str) -> Mapping[str, Any]:
        """Return the data of a queue that only SQS clients use, as written; empty if there is none."""
        return self._records[_SQS].get(queue) or {}

    def sqs_names(self) -> list[str]:
        """Return all queues with data that only SQS clients use, sorted."""
        return sorted(self._records[_SQS])

    def sqs_tasks(self, queue: str) -> Mapping[str, Any]:
        """Return the tasks that SQS clients have started on a queue, as they were written; empty if there are none."""
        return self._records[_SQS_TASKS].get(queue) or {}

    def sqs_tasks_names(self) -> list[str]:
        """Return all queues with such tasks, sorted."""
        return sorted(self._records[_SQS_TASKS])

    def confirmed(self, queue: str) -> int:
        """Return a number that changes when a worker confirms a queue's decorated handler, 0 if it was removed."""
        return self._records[_CONFIRMED].get(queue) or 0

    def quarantines(self) -> list[Quarantine]:
        """Return all quarantine requests, by partition and offset."""
        return [quarantine for _, quarantine in sorted(self._records[_QUARANTINE].items())]

    def quarantine(self, partition: int, offset: int, value: bytes) -> Quarantine | None:
        """Return the request to quarantine a marker record with this content, or None."""
        order: Quarantine | None = self._records[_QUARANTINE].get((partition, offset))
        return order if order is not None and order.fits(value) else None

    def moved(self, queue: str) -> int:
        """Return the value of :attr:`moves` at the last change of a queue's placement."""
        return self._moved.get(queue, 0)

    def defines(self, queue: str) -> bool:
        """Return whether a queue has any layer."""
        return queue in self._layers

    def names(self) -> list[str]:
        """Return all queues that are defined, sorted."""
        return sorted(self._layers)

    def defaults(self, project: str = "") -> Mapping[str, Any]:
        """Return the defaults of a project's queues as they were written; "": of queues without a named project."""
        return self._defaults.get(project, {})

    def projects_with_defaults(self) -> list[str]:
        """Return the named projects that have defaults, sorted."""
        return sorted(self._defaults.keys() - {""})

    def publisher(self, layer: str, queue: str) -> str | None:
        """Return the project that published a layer of a queue, "" without a name; None if there is no such layer."""
        return self._publishers.get(queue, {}).get(layer)

    def project(self, queue: str) -> str | None:
        """Return the project that defines a queue in its marq.toml or code, "" without a name; None if none does."""
        return self._projects.get(queue)

    def layer(self, name: str, queue: str) -> Mapping[str, Any] | None:
        """Return one layer of a queue as it was written; ``name`` is "handler", "file" or "change"."""
        return self._layers.get(queue, {}).get(name)

    def origin(self, queue: str, key: str) -> str:
        """Return the layer of a key: "change", "file", "handler", "defaults", or "" for the built-in default."""
        layers = self._layers.get(queue, {})
        sources = [name for name in LAYERS if key in layers.get(name, {})]
        return sources[-1] if sources else "defaults" if key in self._defaults_of(queue) else ""

    def _defaults_of(self, queue: str) -> Mapping[str, Any]:
        return self._defaults.get(self.project(queue) or "", {})

    def _drop(self, layer: str, queue: str) -> None:
        layers = {name: content for name, content in self._layers.get(queue, {}).items() if name != layer}
        self._publishers[queue] = {
            n: publisher for n, publisher in self._publishers.get(queue, {}).items() if n != layer
        }
        if layers:
            self._layers[queue] = layers
            self._add_up(queue)
        else:
            self._layers.pop(queue, None)
            self._settings.pop(queue, None)
            self._pause_ends.pop(queue, None)
            self._publishers.pop(queue, None)
            self._projects.pop(queue, None)

    def _note(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None:
        records, key = self._records[kind], read_place(name) if kind == _QUARANTINE else name
        if document is None:
            records.pop(key, None)
        else:
            content = _RECORDS[kind](name, document)
            if kind == _CONFIRMED:
                self._confirmations += 1
                content = self._confirmations
            elif kind == _START and key in records:
                # Of two writers that define the queue at the same time, the first decides.
                content = content.decided_by(records[key])
            records[key] = content
        if kind == _PLACEMENT:
            self.moves += 1
            self._moved[name] = self.moves

    def _add_up(self, queue: str) -> None:
        layers = self._layers[queue]
        # While a project that gets its name publishes, only some layers have it.
        self._projects[queue] = max(self._publishers.get(queue, {}).values(), default=None)
        settings = queue_settings(self._defaults_of(queue), *(layers[name] for name in LAYERS if name in layers))
        self._settings[queue] = settings
        self._note_pause(queue, settings)

    def _note_pause(self, queue: str | None, settings: QueueSettings) -> None:
        if settings.paused_until_ms is None:
            self._pause_ends.pop(queue, None)
        else:
            self._pause_ends[queue] = settings.paused_until_ms


def _resumed(settings: QueueSettings) -> QueueSettings:
    return replace(settings, paused=False, paused_until_ms=None)


def _known(document: Mapping[str, Any] | None) -> object:
    if not isinstance(document, Mapping):
        return {} if document is None else document
    return {key: value for key, value in document.items() if key in CHECKS}


def _read_key(key: bytes | None) -> tuple[str, str]:
    try:
        layer, colon, queue = (key or b"").decode().partition(":")
    except UnicodeDecodeError:
        layer, colon, queue = "", "", ""
    known = (_DEFAULTS, *LAYERS, *_RECORDS, *SCHEDULE_LAYERS)
    if not colon or layer not in known:
        raise ConfigError(
            f"the key {key!r} of a definition: expected 'defaults' or one of {', '.join(f'{n}:NAME' for n in known)}"
        )
    return layer, check_queue_name(queue)
