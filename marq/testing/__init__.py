"""An in-memory broker with virtual time for tests of services: the same clients and rules, without Kafka."""

from typing import TYPE_CHECKING

from marq.client.exports import loader

if TYPE_CHECKING:
    from marq.testing.broker import Broker
    from marq.testing.memory import ClientLeftRunning
    from marq.testing.time_passing import Unfinished
    from marq.testing.views import DeadLetter, SeenMessage

__all__ = [
    "Broker",
    "ClientLeftRunning",
    "DeadLetter",
    "SeenMessage",
    "Unfinished",
]

_HOMES = {
    "Broker": "marq.testing.broker",
    "ClientLeftRunning": "marq.testing.memory",
    "DeadLetter": "marq.testing.views",
    "SeenMessage": "marq.testing.views",
    "Unfinished": "marq.testing.time_passing",
}

if not TYPE_CHECKING:
    __getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
