"""Names of topics, groups and headers: the only place where they are spelled, and the rules for queue names."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from marq.core.errors import ConfigError

DEFAULT_PREFIX = "marq"

#: Header prefix that only marq writes.
RESERVED_HEADER = "marq-"
ID_HEADER = "marq-id"
ATTEMPT_HEADER = "marq-attempt"
FIRST_SENT_HEADER = "marq-first-sent"
REASON_HEADER = "marq-reason"
ERROR_HEADER = "marq-error"
ORIGIN_HEADER = "marq-origin"
DIED_AT_HEADER = "marq-died-at"

#: Bytes of a queue's name as UTF-8; the marker format keeps its length in one byte.
MAX_QUEUE_NAME_BYTES = 200
#: Room in a record for the headers that redelivery adds and for Kafka's own framing.
HEADER_ROOM_BYTES = 1_024
#: How much more the markers, changelog and dead-letter topics accept than the messages topic.
ENVELOPE_ROOM_BYTES = 65_536

_PREFIX_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@dataclass(frozen=True, slots=True)
class Names:
    """Every name that one installation uses on a cluster; ``prefix`` keeps installations apart.

    Raises:
        ConfigError: the prefix can't be part of a topic's name.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not 0 < len(self.prefix) <= 100 or not set(self.prefix) <= _PREFIX_CHARACTERS:
            raise ConfigError(
                f"MARQ_PREFIX {self.prefix!r}: expected 1 to 100 of the characters a-z A-Z 0-9 . _ -, "
                "because it begins the names of topics"
            )

    @property
    def messages(self) -> str:
        return f"{self.prefix}.messages"

    @property
    def markers(self) -> str:
        return f"{self.prefix}.markers"

    @property
    def dead_letters(self) -> str:
        return f"{self.prefix}.dead-letters"

    @property
    def quarantine(self) -> str:
        return f"{self.prefix}.quarantine"

    @property
    def app_id(self) -> str:
        """The Faust application's id: the consumer group of trackers and of the queues with handlers."""
        return f"{self.prefix}-app"

    @property
    def changelog(self) -> str:
        return f"{self.app_id}-leases-changelog"

    def group(self, queue: str) -> str:
        """The consumer group of a queue that has one of its own."""
        return f"{self.prefix}.queue.{queue}"

    def transactional_id(self, partition: int) -> str:
        """The id of the one producer that may write for a markers partition."""
        return f"{self.prefix}-tracker-{partition}"


def markers_partition(topic: str, partition: int, count: int) -> int:
    """Return the markers partition of all messages of a source partition: (crc32(topic) + partition) mod count."""
    return (crc32(topic.encode()) + partition) % count


def check_queue_name(name: object) -> str:
    """Return the name of a queue.

    Raises:
        ConfigError: it is no text, empty, too long, or has control characters.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a queue's name is text (str), not {type(name).__name__}: {name!r}")
    if not name:
        raise ConfigError("a queue's name must not be empty")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"queue {name!r}: the name can't be written as UTF-8 ({error.reason})") from error
    if size > MAX_QUEUE_NAME_BYTES:
        raise ConfigError(
            f"queue {name[:40]!r}…: the name has {size} bytes, at most {MAX_QUEUE_NAME_BYTES} are allowed"
        )
    if not name.isprintable():
        raise ConfigError(f"queue {name!r}: the name has characters that can't be printed; leave them out")
    return name
