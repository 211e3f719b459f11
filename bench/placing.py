"""Puts queues on few partitions, as they are when a change of ``spread`` has gone through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import marq
from marq.core.definitions import layer_key, placement_key
from marq.core.spread import Placement, subset


async def place(servers: str, prefix: str, queues: Iterable[str], spread: int, partitions: int) -> None:
    """Define the queues, with the placements that a worker writes after a minute, when nobody sends elsewhere."""
    documents: dict[bytes, Mapping[str, Any] | None] = {}
    for queue in queues:
        own = subset(queue, partitions, spread)
        documents[layer_key("change", queue)] = {"spread": spread}
        documents[placement_key(queue)] = Placement(own, own).document()
    async with marq.Queues(servers, prefix=prefix) as definitions:
        await definitions.publish(documents)
