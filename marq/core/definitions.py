"""What is known of all queues: a fold over the queues topic, and the settings that its layers come to.

The topic is compacted; each of its records is one layer of one queue or schedule, or the defaults of all, under
one of these keys:

* ``defaults``: the [defaults] of queues.toml;
* ``handler:NAME``: what the decorator of a handler says, from the workers that have its code;
* ``file:NAME``: a table of queues.toml;
* ``change:NAME``: what was changed at run time;
* ``placement:NAME``: on which partitions of the messages topic a queue lives (:mod:`marq.core.spread`), from workers;
* ``purge:NAME``: which records of a queue are purged (:mod:`marq.core.purges`);
* ``quarantine:PARTITION/OFFSET``: an order to put one marker record into quarantine (:mod:`marq.core.quarantines`);
* ``schedule-file:NAME``, ``schedule:NAME``: of schedules (:mod:`marq.core.schedules`), from the file and at run time;
* ``check``: nothing, never with a value.

A record without a value takes its layer away. The settings of a queue are our own defaults, then these layers in this
order, of each key the last one that is said: who is nearer to the running system has the last word.

Keys of a document that this version does not know are passed over, so that a newer writer does no harm to an older
reader, which would otherwise lose the layer as a whole and with it, say, the queue's group.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from marq.core.errors import ConfigError
from marq.core.names import check_queue_name
from marq.core.purges import Purge
from marq.core.quarantines import Quarantine, read_place
from marq.core.queue import CHECKS, QueueSettings, check_defaults, check_document, queue_settings
from marq.core.schedules import LAYERS as SCHEDULE_LAYERS
from marq.core.schedules import ScheduleLayers
from marq.core.spread import EVERYWHERE, Placement

#: The group of queues that have a handler and name no group.
HANDLERS_GROUP = "handlers"
#: Layers of one queue, weakest first.
LAYERS = ("handler", "file", "change")
DEFAULTS_KEY = b"defaults"
_PLACEMENT, _PURGE, _QUARANTINE = "placement", "purge", "quarantine"
#: A record without a value by which `faust -A app check` learns what time it is for the broker.
CHECK_KEY = b"check"


def layer_key(layer: str, queue: str) -> bytes:
    """Return the key of a queue's layer in the queues topic."""
    return f"{layer}:{queue}".encode()


def placement_key(queue: str) -> bytes:
    """Return the key of a queue's placement in the queues topic."""
    return f"{_PLACEMENT}:{queue}".encode()


def purge_key(queue: str) -> bytes:
    """Return the key of a queue's purge in the queues topic."""
    return f"{_PURGE}:{queue}".encode()


def quarantine_key(quarantine: Quarantine) -> bytes:
    """Return the key of an order of quarantine in the queues topic."""
    return f"{_QUARANTINE}:{quarantine.place}".encode()


class Definitions:
    """Calling it gives the settings of a queue, defined or not."""

    def __init__(self) -> None:
        self.schedules = ScheduleLayers()
        self._defaults: dict[str, Any] = {}
        self._layers: dict[str, dict[str, dict[str, Any]]] = {}
        # Trackers ask for each message, so that sums are kept.
        self._default_settings = QueueSettings()
        self._settings: dict[str, QueueSettings] = {}
        # Sorted, by group; None where a record has come since. Members ask for each batch of messages.
        self._by_group: dict[str, list[str]] | None = None
        #: How many placements have been read; it tells whether one has changed meanwhile.
        self.moves = 0
        self._placements: dict[str, Placement] = {}
        self._moved: dict[str, int] = {}
        self._purges: dict[str, Purge] = {}
        #: Orders of quarantine, by partition and offset.
        self._quarantines: dict[tuple[int, int], Quarantine] = {}

    def fold(self, key: bytes | None, document: Mapping[str, Any] | None) -> str | None:
        """Take one record of the queues topic; return the queue concerned, None when it is all or none.

        Raises:
            ConfigError: the key or the document can't be understood; everything stays as it was.
        """
        if key == CHECK_KEY and document is None:
            return None
        self._by_group = None
        if key == DEFAULTS_KEY:
            self._defaults = check_defaults(_known(document), "the record 'defaults'")
            self._default_settings = queue_settings(self._defaults)
            for queue in self._layers:
                self._add_up(queue)
            return None
        layer, queue = _read_key(key)
        if layer in SCHEDULE_LAYERS:
            self.schedules.fold(layer, queue, document)
            return None
        if layer == _PLACEMENT:
            self._place(queue, document)
            return queue
        if layer == _PURGE:
            self._note_purge(queue, document)
            return queue
        if layer == _QUARANTINE:
            self._note_quarantine(queue, document)
            return None
        if document is None:
            self._drop(layer, queue)
        else:
            checked = check_document(_known(document), f"the record '{layer}:{queue}'")
            self._layers[queue] = {**self._layers.get(queue, {}), layer: checked}
            self._add_up(queue)
        return queue

    def settings(self, queue: str) -> QueueSettings:
        """Return what holds for a queue."""
        return self._settings.get(queue, self._default_settings)

    __call__ = settings

    def after(self, records: Mapping[bytes, Mapping[str, Any] | None]) -> Definitions:
        """Return what these would be after further records; they stay as they are.

        Raises:
            ConfigError: one of them can't be understood.
        """
        later = Definitions()
        # No layer is ever changed, but replaced by another, so that these have nothing to fear.
        later.schedules = copy.deepcopy(self.schedules)
        later._defaults, later._default_settings = self._defaults, self._default_settings
        later._purges = dict(self._purges)
        later._quarantines = dict(self._quarantines)
        later._layers, later._settings = dict(self._layers), dict(self._settings)
        for key, document in records.items():
            later.fold(key, document)
        return later

    def group(self, queue: str) -> str | None:
        """Return the named group of a queue, None for a group of its own."""
        return group_of(self.settings(queue))

    def queues_of(self, group: str) -> list[str]:
        """Return the queues of a named group, sorted."""
        if self._by_group is None:
            self._by_group = {}
            for queue in self.names():
                if (named := self.group(queue)) is not None:
                    self._by_group.setdefault(named, []).append(queue)
        return list(self._by_group.get(group, ()))

    def queue_of_topic(self, topic: str) -> str | None:
        """Return the queue whose own topic this is; of several, which nobody who writes allows, the first."""
        return next((queue for queue in self.names() if self.settings(queue).topic == topic), None)

    def placement(self, queue: str) -> Placement:
        """Return on which partitions of the messages topic a queue lives now."""
        return self._placements.get(queue, EVERYWHERE)

    def placed(self) -> list[str]:
        """Return all queues that have a placement or are to have one, sorted."""
        return sorted({*self._placements, *[name for name in self._layers if self.settings(name).spread is not None]})

    def purge(self, queue: str) -> Purge | None:
        """Return which records of a queue are purged, None when it never was."""
        return self._purges.get(queue)

    def quarantines(self) -> list[Quarantine]:
        """Return all orders of quarantine, by partition and offset."""
        return [each for _, each in sorted(self._quarantines.items())]

    def quarantine(self, partition: int, offset: int, value: bytes) -> Quarantine | None:
        """Return the order to put a marker record with this content into quarantine, None when there is none."""
        found = self._quarantines.get((partition, offset))
        return found if found is not None and found.fits(value) else None

    def moved(self, queue: str) -> int:
        """Return what :attr:`moves` was at the last change of a queue's placement."""
        return self._moved.get(queue, 0)

    def defines(self, queue: str) -> bool:
        """Return whether anything is said of a queue."""
        return queue in self._layers

    def names(self) -> list[str]:
        """Return all queues that are defined, sorted."""
        return sorted(self._layers)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The layer of all queues, as it was written."""
        return self._defaults

    def layer(self, name: str, queue: str) -> Mapping[str, Any] | None:
        """Return one layer of a queue as it was written; ``name`` is "handler", "file" or "change"."""
        return self._layers.get(queue, {}).get(name)

    def origin(self, queue: str, key: str) -> str:
        """Return which layer says a key of a queue: "change", "file", "handler" or "defaults"; "" when none does."""
        layers = self._layers.get(queue, {})
        said = [name for name in LAYERS if key in layers.get(name, {})]
        return said[-1] if said else "defaults" if key in self._defaults else ""

    def _drop(self, layer: str, queue: str) -> None:
        layers = {name: each for name, each in self._layers.get(queue, {}).items() if name != layer}
        if layers:
            self._layers[queue] = layers
            self._add_up(queue)
        else:
            self._layers.pop(queue, None)
            self._settings.pop(queue, None)

    def _place(self, queue: str, document: Mapping[str, Any] | None) -> None:
        if document is None:
            self._placements.pop(queue, None)
        else:
            try:
                self._placements[queue] = Placement.read(document)
            except ConfigError as error:
                raise ConfigError(f"the record '{_PLACEMENT}:{queue}': {error}") from error
        self.moves += 1
        self._moved[queue] = self.moves

    def _note_purge(self, queue: str, document: Mapping[str, Any] | None) -> None:
        if document is None:
            self._purges.pop(queue, None)
            return
        try:
            self._purges[queue] = Purge.read(document)
        except ConfigError as error:
            raise ConfigError(f"the record '{_PURGE}:{queue}': {error}") from error

    def _note_quarantine(self, place: str, document: Mapping[str, Any] | None) -> None:
        try:
            if document is None:
                self._quarantines.pop(read_place(place), None)
            else:
                self._quarantines[read_place(place)] = Quarantine.read(place, document)
        except ConfigError as error:
            raise ConfigError(f"the record '{_QUARANTINE}:{place}': {error}") from error

    def _add_up(self, queue: str) -> None:
        layers = self._layers[queue]
        self._settings[queue] = queue_settings(self._defaults, *(layers[name] for name in LAYERS if name in layers))


def group_of(settings: QueueSettings) -> str | None:
    """Return the named group of a queue with these settings, None for a group of its own."""
    return settings.group or (HANDLERS_GROUP if settings.handler else None)


def _known(document: Mapping[str, Any] | None) -> object:
    if not isinstance(document, Mapping):
        return {} if document is None else document
    return {key: value for key, value in document.items() if key in CHECKS}


def _read_key(key: bytes | None) -> tuple[str, str]:
    try:
        layer, colon, queue = (key or b"").decode().partition(":")
    except UnicodeDecodeError:
        layer, colon, queue = "", "", ""
    known = (*LAYERS, _PLACEMENT, _PURGE, _QUARANTINE, *SCHEDULE_LAYERS)
    if not colon or layer not in known:
        raise ConfigError(
            f"the key {key!r} of a definition: expected 'defaults' or one of {', '.join(f'{n}:NAME' for n in known)}"
        )
    return layer, check_queue_name(queue)
