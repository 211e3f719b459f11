"""Loading the handlers that queues.toml names."""

from pathlib import Path

import pytest

from agents.handlers import load_handler
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
