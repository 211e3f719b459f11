"""Settings of queues that operators change on pages, with the checks of ``marq queue --set``."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from marq.testing import Broker
from marq.wire.errors import ConfigError
from marq_worker.web.dashboard.actor import Actor


async def test_a_setting_is_changed_shown_and_undone() -> None:
    async with Broker(queues={"emails": {"max_attempts": 3, "backoff": [1, 5]}}) as broker:
        actor = Actor(Mock(), Mock(), broker.queues, Mock(), Mock(), Mock())

        first = [await actor.setting("emails", key) for key in ("max_attempts", "deduplication_window", "backoff")]
        for key, text in (("max_attempts", "unlimited"), ("lease", "90"), ("deduplication_window", "60")):
            await actor.change_setting("emails", key, text)
        changed = broker.queues["emails"]
        await actor.change_setting("emails", "max_attempts", "")

        assert first == ["3", "300", "{ delays = [1, 5], jitter = false }"]
        assert (changed.max_attempts, changed.lease, changed.deduplication_window) == ("unlimited", 90, 60)
        # marq.toml applies again, and the other changes stay.
        assert (broker.queues["emails"].max_attempts, broker.queues["emails"].lease) == (3, 90)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("leese", "5", "unknown setting 'leese'; expected one of lease"),
        ("lease", "0", "queue .emails.: lease"),
        ("lease", "soon", "expected a duration such as"),
        # A login for pages must not decide which code runs.
        ("handler", "tasks:send", "handler can't be changed on a page"),
        ("topic", "payroll", "topic can't be changed on a page"),
        ("group", "mail", "group can't be changed on a page"),
        ("max_lease", "1", "max_lease = 1 .* is shorter than lease"),
    ],
)
async def test_a_setting_that_can_not_be_used_is_refused(key: str, text: str, said: str) -> None:
    async with Broker(queues={"emails": {"max_attempts": 3}}) as broker:
        actor = Actor(Mock(), Mock(), broker.queues, Mock(), Mock(), Mock())

        with pytest.raises(ConfigError, match=said):
            await actor.change_setting("emails", key, text)

        assert broker.queues.definitions.layer("change", "emails") is None
    with pytest.raises(ConfigError, match="unknown setting"):
        await actor.setting("emails", "leese")
