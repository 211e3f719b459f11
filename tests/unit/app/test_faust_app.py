"""What Faust is told by our settings."""

from __future__ import annotations

import pytest

from marq_worker.app.faust_app import MarqApp, new_app
from marq_worker.config.settings import load_client_settings, load_settings


@pytest.mark.parametrize("seconds", [6, 10, 300])
def test_each_session_timeout_that_may_be_set_is_shorter_than_what_a_request_may_take(
    monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Else Faust's consumer does not start."""
    monkeypatch.setenv("MARQ_SESSION_TIMEOUT", str(seconds))
    settings = load_settings()

    conf = new_app(MarqApp, "t-app", settings, load_client_settings(settings), store="memory://").conf

    assert conf.broker_session_timeout == seconds
    assert conf.broker_request_timeout > seconds
