"""The settings of a queue with their origins, as ``marq queue`` and the pages show them."""

from __future__ import annotations

from typing import Any

from marq.settings.definitions import Definitions
from marq.settings.queue import ALL, settings_document
from marq.wire.names import Names


def queue_document(name: str, definitions: Definitions, names: Names) -> dict[str, Any]:
    group, placement = definitions.group(name), definitions.placement(name)
    return {
        "queue": name,
        "defined": name in definitions.names(),
        "group": group,
        "consumer_group": definitions.consumer_group(name, names),
        "partitions": {"sent_to": placement.sends or ALL, "read": placement.reads or ALL},
        "settings": {
            key: {"value": value, "from": definitions.origin(name, key) or "default"}
            for key, value in settings_document(definitions.settings(name)).items()
        },
    }
