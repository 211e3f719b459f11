"""Names of topics, groups and headers, which are spelled only here; rules for queue names; partitions of markers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote
from zlib import crc32

from marq.wire.errors import ConfigError

DEFAULT_PREFIX = "marq"

#: Header prefix that only marq writes.
RESERVED_HEADER = "marq-"
ID_HEADER = "marq-id"
ATTEMPT_HEADER = "marq-attempt"
#: Earliest delivery time of a record, in milliseconds since the epoch; any producer may set it.
DELIVER_AT_HEADER = "marq-deliver-at"
#: Time after which a message is not delivered, in milliseconds since the epoch, or "never"; any producer may set it.
EXPIRES_AT_HEADER = "marq-expires-at"
FIRST_SENT_HEADER = "marq-first-sent"
#: When a message was first acquired, by the log's clock; in redeliveries and dead letters only.
FIRST_RECEIVED_HEADER = "marq-first-received"
REASON_HEADER = "marq-reason"
#: Of a message whose value is left out because it does not fit: the place and the size of its record, as text.
TOO_LARGE_HEADER = "marq-too-large"
#: Of a message whose record was removed before it was copied: the place of the record, as text.
GONE_HEADER = "marq-gone"
ERROR_HEADER = "marq-error"
#: The traceback of the last attempt, in dead letters only.
TRACEBACK_HEADER = "marq-traceback"
#: Number of consecutive releases that did not count.
UNCOUNTED_HEADER = "marq-uncounted"
#: Number of consecutive deliveries whose leases have expired.
EXPIRED_HEADER = "marq-expired"
ORIGIN_HEADER = "marq-origin"
DEAD_LETTERED_AT_HEADER = "marq-dead-lettered-at"
#: The disposition in a note about dead letters (:mod:`marq.wire.dead_letter_notes`).
SETTLED_HEADER = "marq-settled"
#: Header of a schedule's message: the time of the previous one, in seconds since the epoch.
PREVIOUS_HEADER = "marq-previous-time"
#: Header of a schedule's message: the last times of the same definition that were delivered, the latest first.
RUNS_HEADER = "marq-previous-runs"
#: Header of a replayed message: the place of the original record.
REPLAYED_HEADER = "marq-replayed-from"
#: The ordering key of a message in the messages topic, as bytes.
ORDERING_KEY_HEADER = "marq-ordering-key"
#: The sender's deduplication id, as UTF-8; it only counts in a producer's DELAY.
DEDUPLICATION_ID_HEADER = "marq-deduplication-id"
#: The type of a message, as UTF-8, by which a worker chooses among the handlers of its queue; any producer may set it.
TYPE_HEADER = "marq-type"
#: The sequence of a message that was sent as a DELAY with an ordering key (:func:`marq.wire.record_headers.sequence`).
SEQUENCE_HEADER = "marq-sequence"
#: The sender's record key, because that of a redelivery is the queue's name.
KEY_HEADER = "marq-key"

#: The first characters of the synthetic topics of schedules; see :func:`is_synthetic`.
_SCHEDULED = "~schedule/"

#: Between the name and the id of a topic; Kafka does not allow it in names of topics.
_INCARNATION = "@"
#: Digits of a topic's id in the name of its incarnation, and the most bytes of a topic in the marker format.
_ID_DIGITS, _MAX_MARKER_TOPIC = 12, 255

#: Bytes of a queue's name as UTF-8; the marker format keeps its length in one byte.
MAX_QUEUE_NAME_BYTES = 200
#: Maximum number of headers of a sent message. A marker has room for 65,535: redelivery and redrive add some.
MAX_HEADERS = 65_500
#: Bytes of a header's name as UTF-8; the marker format keeps its length in two bytes.
MAX_HEADER_NAME_BYTES = 65_535
#: Maximum number of bytes that Kafka's framing adds to a batch of one record.
FRAME_BYTES = 512
#: Room in a record for the headers that redelivery adds and for Kafka's own framing.
HEADER_ROOM_BYTES = 1_024
#: How much more the markers, changelog and dead-letter topics accept than the messages topic.
ENVELOPE_ROOM_BYTES = 65_536

#: The characters of a topic's name, and Kafka's limit for its length.
_TOPIC_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MAX_TOPIC_NAME = 249


#: The rule for a prefix, for errors that name its source.
PREFIX_RULE = "expected 1 to 100 of the characters a-z A-Z 0-9 . _ -, because it begins the names of topics"


def markers_partition(topic: str, partition: int, count: int) -> int:
    """Return the markers partition of all messages of a source partition: (crc32(topic) + partition) mod count.

    All incarnations of a topic share it, so that its tracker sees when the topic is created again.
    """
    return (crc32(log_name(topic).encode()) + partition) % count


def source_partition(topic: str, wanted: int, count: int) -> int:
    """Return the first partition of a source whose messages are in the ``wanted`` markers partition."""
    return (wanted - crc32(topic.encode())) % count


def deduplicating_partition(queue: str, place: bytes, count: int) -> int:
    """Return the markers partition whose tracker checks deduplication ids.

    ``place`` is the ordering key of the message, or without one its id. One tracker must check all messages
    with the same id, and all with the same key, in their order.
    """
    return int.from_bytes(sha256(queue.encode() + b"\0" + place).digest()[:8]) % count


def check_prefix(prefix: str, name: str = "prefix") -> str:
    """Return a valid prefix; ``name`` is the setting that errors name. Raises ConfigError."""
    if not 0 < len(prefix) <= 100 or not set(prefix) <= _TOPIC_CHARACTERS:
        raise ConfigError(f"{name}={prefix!r}: {PREFIX_RULE}")
    return prefix


@dataclass(frozen=True, slots=True)
class Names:
    """The names that one namespace uses on a cluster. Raises ConfigError."""

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        check_prefix(self.prefix)

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
    def queues(self) -> str:
        """The compacted topic of the queues' definitions."""
        return f"{self.prefix}.queues"

    @property
    def offset_snapshots(self) -> str:
        """The compacted topic of the snapshots of groups with many queues; made when the first one is written."""
        return f"{self.prefix}.offset-snapshots"

    @property
    def app_id(self) -> str:
        """The id of the worker's Faust application: the consumer group of trackers."""
        return f"{self.prefix}-app"

    @property
    def backlog(self) -> str:
        """The group, without members, in which workers commit the offsets where waiting messages start."""
        return f"{self.prefix}-backlog"

    @property
    def changelog(self) -> str:
        return f"{self.app_id}-leases-changelog"

    def group(self, queue: str) -> str:
        """The consumer group of a queue that has one of its own."""
        return f"{self.prefix}.queue.{queue}"

    def named_group(self, group: str) -> str:
        """The consumer group of the queues whose settings name ``group``."""
        return f"{self.prefix}.group.{group}"

    def is_own_topic(self, topic: str) -> bool:
        """Return whether a topic is one of the namespace's, which cannot belong to a queue."""
        return topic in {
            self.messages,
            self.markers,
            self.dead_letters,
            self.quarantine,
            self.queues,
            self.offset_snapshots,
            self.changelog,
        }

    def is_senders_topic(self, topic: str) -> bool:
        """Return whether records of a message's topic have their senders' keys: it is or was a queue's own topic."""
        return not is_synthetic(topic) and not self.is_own_topic(topic)

    def has_incarnations(self, topic: str) -> bool:
        """Return whether this is the name of a queue's own topic without the id of its incarnation."""
        return self.is_senders_topic(topic) and _INCARNATION not in topic

    def owner_of_group(self, group: str) -> str | None:
        """Return the queue that has a consumer group to itself; None for any other group."""
        head = self.group("")
        return group[len(head) :] if group.startswith(head) else None

    def is_group(self, group: str) -> bool:
        """Return whether it is a consumer group of this namespace's queues."""
        return group.startswith((self.group(""), f"{self.prefix}.group."))

    def transactional_id(self, partition: int) -> str:
        """The id of the one producer that may write for a markers partition."""
        return f"{self.transactional_ids}{partition}"

    @property
    def transactional_ids(self) -> str:
        """The prefix of the ids of all trackers' producers."""
        return f"{self.prefix}-tracker-"

    def start_id(self, group: str, member: str) -> str:
        """The id of a transactional consumer's producer."""
        # Quoted, so that no member of one group can have the id of another's.
        return f"{self.start_ids}{quote(member, safe='')}:{group}"

    @property
    def start_ids(self) -> str:
        """The prefix of the ids of all transactional consumers' producers."""
        return f"{self.prefix}-start-"


def incarnation(topic: str, topic_id: str) -> str:
    """Return the topic in the identities of messages that are records of a queue's own topic.

    If a topic is deleted and created again, its offsets begin at 0 again. A marker about a former record must not
    concern the new record at the same offset: an ACK would lose it. ``topic_id`` (hexadecimal) differs between the two;
    it is empty if the brokers have no ids (before Kafka 2.8), and then the name stays as it is.
    """
    return f"{topic}{_INCARNATION}{topic_id[:_ID_DIGITS]}"[:_MAX_MARKER_TOPIC] if topic_id else topic


def incarnation_id(topic: str) -> str:
    """Return the id in the name that :func:`incarnation` returned, empty if it has none."""
    return topic.partition(_INCARNATION)[2]


def log_name(topic: str) -> str:
    """Return the name of a topic without the id of its incarnation: the one that Kafka knows."""
    return topic.partition(_INCARNATION)[0]


#: The topic in a PURGE of messages that are not records yet.
WITHOUT_RECORDS = "~"


def synthetic_topic(number: int) -> str:
    """Return the topic in the identities of delayed messages, which are not records yet.

    Each sender draws a 128-bit number. Kafka does not allow such a name.
    """
    return f"~{number:032x}"


def is_synthetic(topic: str) -> bool:
    """Return whether a sender of delayed messages drew this name."""
    return topic.startswith("~")


def schedule_topic(name: str, digest: str) -> str:
    """Return the topic in the identities of a schedule's messages."""
    return f"{_SCHEDULED}{name}/{digest}"


def is_scheduled(topic: str) -> bool:
    """Return whether this is the topic of a schedule's messages."""
    return topic.startswith(_SCHEDULED)


def schedule_name(topic: str) -> str:
    """Return the name of the schedule of such a topic."""
    return topic.removeprefix(_SCHEDULED).partition("/")[0]


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to a mistyped one, or None."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return close[0] if close else None


def check_queue_name(name: object) -> str:
    """Return the name of a queue. Raises ConfigError if it is not text, empty, too long, or has control characters."""
    return _check_name("queue", name)


def check_group_name(name: object) -> str:
    """Return the name of a group of queues; the rules are those of :func:`check_queue_name`. Raises ConfigError."""
    return _check_name("group", name)


def check_type_name(name: object) -> str:
    """Return a type of messages; the rules are those of :func:`check_queue_name`. Raises ConfigError."""
    return _check_name("type", name)


def check_topic_name(name: object) -> str:
    """Return the name of a topic. Raises ConfigError if Kafka would not allow it."""
    if not isinstance(name, str) or not set(name) <= _TOPIC_CHARACTERS or not 0 < len(name) <= _MAX_TOPIC_NAME:
        raise ConfigError(
            f"expected the name of a topic, 1 to {_MAX_TOPIC_NAME} of the characters a-z A-Z 0-9 . _ -, not {name!r}"
        )
    if name in {".", ".."}:
        raise ConfigError(f"expected the name of a topic, but Kafka does not allow {name!r}")
    return name


def utf8(text: str, what: str) -> bytes:
    """Return the bytes of a text, which errors call ``what``. Raises ConfigError."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} can't be encoded as UTF-8: {error.reason}") from error


def _check_name(noun: str, name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"a {noun}'s name is text (str), not {type(name).__name__}: {name!r}")
    if not name:
        raise ConfigError(f"a {noun}'s name must not be empty")
    size = len(utf8(name, f"{noun} {name!r}: the name"))
    if size > MAX_QUEUE_NAME_BYTES:
        raise ConfigError(
            f"{noun} {name[:40]!r}…: the name has {size} bytes, at most {MAX_QUEUE_NAME_BYTES} are allowed"
        )
    if not name.isprintable():
        raise ConfigError(f"{noun} {name!r}: the name has unprintable characters; remove them")
    return name
