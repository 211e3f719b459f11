"""What is known of all queues: a fold over the queues topic, and the settings that its layers come to.

The topic is compacted; each of its records is one layer of one queue or schedule, or the defaults of all, under
one of these keys:

* ``defaults``: the [defaults] of queues.toml;
* ``handler:NAME``: what the decorator of a handler says, from the workers that have its code;
* ``file:NAME``: a table of queues.toml;
* ``change:NAME``: what was changed at run time;
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
from marq.core.queue import CHECKS, QueueSettings, check_defaults, check_document, queue_settings
from marq.core.schedules import LAYERS as SCHEDULE_LAYERS
from marq.core.schedules import ScheduleLayers

#: The group of queues that have a handler and name no group.
HANDLERS_GROUP = "handlers"
#: Layers of one queue, weakest first.
LAYERS = ("handler", "file", "change")
DEFAULTS_KEY = b"defaults"
#: A record without a value by which `faust -A app check` learns what time it is for the broker.
CHECK_KEY = b"check"


def layer_key(layer: str, queue: str) -> bytes:
    """Return the key of a queue's layer in the queues topic."""
    return f"{layer}:{queue}".encode()


class Definitions:
    """Calling it gives the settings of a queue, defined or not."""

    def __init__(self) -> None:
        self.schedules = ScheduleLayers()
        self._defaults: dict[str, Any] = {}
        self._layers: dict[str, dict[str, dict[str, Any]]] = {}
        # Trackers ask for each message, so that sums are kept.
        self._default_settings = QueueSettings()
        self._settings: dict[str, QueueSettings] = {}

    def fold(self, key: bytes | None, document: Mapping[str, Any] | None) -> str | None:
        """Take one record of the queues topic; return the queue concerned, None when it is all or none.

        Raises:
            ConfigError: the key or the document can't be understood; everything stays as it was.
        """
        if key == CHECK_KEY and document is None:
            return None
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
        if document is None:
            self._drop(layer, queue)
        else:
            checked = check_document(_known(document), f"the record '{layer}:{queue}'")
            self._layers.setdefault(queue, {})[layer] = checked
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
        later = copy.deepcopy(self)
        for key, document in records.items():
            later.fold(key, document)
        return later

    def group(self, queue: str) -> str | None:
        """Return the named group of a queue, None for a group of its own."""
        return group_of(self.settings(queue))

    def queues_of(self, group: str) -> list[str]:
        """Return the queues of a named group, sorted."""
        return [queue for queue in self.names() if self.group(queue) == group]

    def queue_of_topic(self, topic: str) -> str | None:
        """Return the queue whose own topic this is; of several, which nobody who writes allows, the first."""
        return next((queue for queue in self.names() if self.settings(queue).topic == topic), None)

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
        layers = self._layers.get(queue, {})
        layers.pop(layer, None)
        if layers:
            self._add_up(queue)
        else:
            self._layers.pop(queue, None)
            self._settings.pop(queue, None)

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
    known = (*LAYERS, *SCHEDULE_LAYERS)
    if not colon or layer not in known:
        raise ConfigError(
            f"the key {key!r} of a definition: expected 'defaults' or one of {', '.join(f'{n}:NAME' for n in known)}"
        )
    return layer, check_queue_name(queue)
