"""Definitions of queues, as their log says them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marq.settings.definitions import Definitions


def defined(**layers: Mapping[str, Any]) -> Definitions:
    """Return definitions with these layers; a name like ``file__emails`` stands for the key ``file:emails``."""
    definitions = Definitions()
    for name, document in layers.items():
        definitions.fold(name.replace("__", ":").encode(), document)
    return definitions


def in_file(**queues: Mapping[str, Any]) -> Definitions:
    """Return the definitions of a file with these queues."""
    return defined(**{f"file__{queue}": document for queue, document in queues.items()})
