"""The options of ``send`` and ``send_many``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict

from marq.client.delivery_time import At, Delay
from marq.client.message_checks import Headers
from marq.settings.durations import Duration


class TimeOptions(TypedDict, total=False):
    """When to deliver a message."""

    delay: Duration | None
    at: datetime | None


class SendOptions(TimeOptions, total=False):
    """The options of ``send``."""

    headers: Headers | None
    type: str | None
    ordering_key: str | bytes | None
    deduplication_id: str | None
    expires_in: Duration | None


class SendManyOptions(TypedDict, total=False):
    """The options of ``send_many``."""

    headers: Headers | None
    type: str | None
    ordering_key: str | bytes | None
    delay: Delay | None
    at: At | None
    deduplication_ids: Sequence[str] | None
    expires_in: Duration | None
