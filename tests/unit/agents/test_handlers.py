"""Loading the handlers that queues.toml names."""

from pathlib import Path

import faust
import pytest

from marq.wire.errors import ConfigError
from marq_worker.agents.handler_groups import HandledQueue, HandlerGroup
from marq_worker.agents.queue_consumer import (
    declare,
    load_handler,
    load_handlers,
    load_modules,
    modules_around,
    surrounding,
)


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


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("def connect():\n    raise ValueError('no settings')\nconnect()\n", ["line 3, in <module>", "in connect"]),
        ("import nowhere_at_all\n", ["line 1, in <module>", "import nowhere_at_all"]),
        ("def broken(:\n", ["line 1", "def broken(:"]),
    ],
)
def test_a_module_whose_import_fails_is_named_with_the_traceback_of_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, shown: list[str]
) -> None:
    module = f"handlers_{abs(hash(source))}_shown"
    (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError) as decorated:
        load_modules((module,))
    with pytest.raises(ConfigError) as named:
        load_handler("emails", f"{module}:handle")

    for error in (decorated.value, named.value):
        [note] = error.__notes__
        assert all(part in note for part in [f"{module}.py", *shown])
        assert "importlib" not in note


@pytest.mark.parametrize("name", ["nowhere_at_all:handle", "json:nothing"])
def test_a_module_or_function_that_does_not_exist_needs_no_traceback(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_handler("emails", name)

    assert not hasattr(caught.value, "__notes__")


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


async def test_a_worker_lists_the_queue_consumer_and_reads_nothing_for_it() -> None:
    app = faust.App("worker", store="memory://")
    declare(app, app.topic("marq.messages"), None)
    agent = app.agents["queue consumer"]

    await agent.start()
    topics = list(app.topics)
    await agent.stop()

    assert "ACQUIRE" in agent.help
    assert topics == []


def test_handlers_are_surrounded_by_their_own_modules_and_those_that_the_worker_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "with_lifespan": "import marq\n@marq.lifespan\nasync def pool(): yield\n",
        "with_middleware": "import marq\n@marq.middleware\nasync def timed(message, call_next): ...\n",
        "with_both": "from with_lifespan import pool\nfrom with_middleware import timed\ndef handle(message): ...\n",
        "with_neither": "def handle(message): ...\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    queues = {name: HandledQueue(f"{name}:handle", 1) for name in ("with_both", "with_neither", "not_loaded")}

    assert surrounding(tuple(sources)) == ("with_lifespan", "with_middleware", "with_both")
    modules = modules_around(HandlerGroup("handlers", queues, ("with_middleware",)), ["with_neither", "with_both"])
    assert [module.__name__ for module in modules] == ["with_middleware", "with_neither", "with_both"]
