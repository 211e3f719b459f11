"""Loading the handlers that queues.toml names."""

from pathlib import Path

import pytest

from agents.handler_groups import HandledQueue, HandlerGroup
from agents.handlers import load_handler, load_handlers
from marq.core.errors import ConfigError


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("raise ValueError('no settings')\n", "no settings"),
        ("import nowhere_at_all\n", "nowhere_at_all"),
        ("other = 1\n", "handle"),
        ("handle = 5\n", "expected a function"),
    ],
)
def test_a_handler_that_can_not_be_had_is_named_with_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    module = f"handlers_{abs(hash(source))}"
    (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match=f"queue 'emails'.*{said}"):
        load_handler("emails", f"{module}:handle")


def test_a_queue_whose_handler_can_not_be_had_is_left_out_with_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "handlers_that_are_there.py").write_text("def handle(message): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    there, nowhere = HandledQueue("handlers_that_are_there:handle", 1), HandledQueue("nowhere_at_all:handle", 1)

    found = load_handlers(HandlerGroup("handlers", {"broken": nowhere, "emails": there}))

    assert list(found) == ["emails"]
    assert "queue 'broken': its handler 'nowhere_at_all:handle' can't be imported" in caplog.text
    with pytest.raises(ConfigError, match="queue 'broken'"):
        load_handlers(HandlerGroup("handlers", {"broken": nowhere}))
