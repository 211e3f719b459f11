"""Which node of which cluster a broker is."""

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_NODE_ID = 1


@dataclass(frozen=True, slots=True)
class Membership:
    """A node's id, and of all nodes of its cluster the controllers' ports on 127.0.0.1, by node id."""

    node_id: int
    controllers: Mapping[int, int]
    cluster_id: str


def new_cluster_id() -> str:
    """An id for a cluster's data, as Kafka wants it."""
    # The "u" in front: an id that begins with "-" would be taken for an option.
    return "u" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
