"""Loading the handlers that queues.toml names."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from marq.client.codecs import CodecsByType
from marq.wire.errors import ConfigError
from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.handlers.handler_modules import check_exists
from marq_worker.handlers.loaded_handlers import (
    load_handler,
    load_handlers,
    load_handlers_of,
    load_modules,
    modules_around,
    modules_in,
    surrounding,
    without_handlers,
)

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module that can be imported, and returns its name."""

    def write(source: str, name: str = "") -> str:
        # Another test's module of this name would be imported already.
        name = name or f"module_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


@pytest.mark.parametrize(
    ("source", "said", "shown"),
    [
        (
            "def connect():\n    raise ValueError('no settings')\nconnect()\n",
            "no settings",
            ["line 3, in <module>", "in connect"],
        ),
        ("import nowhere_at_all\n", "nowhere_at_all", ["line 1, in <module>", "import nowhere_at_all"]),
        ("def broken(:\n", "SyntaxError", ["line 1", "def broken(:"]),
    ],
)
def test_a_module_whose_import_fails_is_named_with_the_traceback_of_its_own_code(
    write: Write, source: str, said: str, shown: list[str]
) -> None:
    module = write(source)

    with pytest.raises(ConfigError) as decorated:
        load_modules((module,))
    with pytest.raises(ConfigError, match=f"queue 'emails'.*{said}") as named:
        load_handler("emails", f"{module}:handle")

    for error in (decorated.value, named.value):
        [note] = error.__notes__
        assert all(part in note for part in [f"{module}.py", *shown])
        assert "importlib" not in note


def test_a_handler_that_is_no_function_is_named_with_its_queue(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"queue 'emails'.*expected a function"):
        load_handler("emails", f"{write('handle = 5')}:handle")


@pytest.fixture
def in_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in a directory with a module my_handlers, which has not been imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in {"", str(tmp_path)}])
    monkeypatch.delitem(sys.modules, "my_handlers", raising=False)
    (tmp_path / "my_handlers.py").touch()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all", "there is no such module; expected a module that is importable from /"),
        ("my_handlers.py", "there is no such module; write 'my_handlers', without .py"),
        ("my_handler", "there is no such module; did you mean 'my_handlers'?"),
    ],
)
@pytest.mark.usefixtures("in_project")
def test_a_module_that_does_not_exist_needs_no_traceback(name: str, said: str) -> None:
    for refuse in (check_exists, lambda name: load_modules((name,))):
        with pytest.raises(ConfigError) as caught:
            refuse(name)

        assert str(caught.value).startswith(f"MARQ_HANDLERS: module {name!r} can't be imported: {said}")
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("name", ["my_handlers", "json", "os.path", "email.mime.text"])
@pytest.mark.usefixtures("in_project")
def test_a_module_that_exists_is_found_without_an_import_of_it_and_the_path_of_imports_stays(name: str) -> None:
    # Otherwise a user's statistics.py would replace the standard library's, which Faust imports later.
    before = sys.path[:]

    check_exists(name)

    assert sys.path == before
    assert "my_handlers" not in sys.modules


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("json:nothing", "module 'json' has no attribute 'nothing'; expected MODULE:FUNCTION"),
        ("json:lods", "module 'json' has no attribute 'lods'; did you mean 'loads'?"),
    ],
)
def test_a_function_that_does_not_exist_needs_no_traceback(name: str, said: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"queue 'emails': its handler {name!r} can't be imported: {said}")
    ) as caught:
        load_handler("emails", name)

    assert not hasattr(caught.value, "__notes__")


UNPRINTABLE = """
class Unprintable(Exception):
    def __str__(self):
        raise ValueError
    __repr__ = __str__
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def __getattr__(name): raise Unprintable", "<unprintable>; expected MODULE:FUNCTION"),
        ("raise SystemExit(Unprintable())", "it ends the process (<unprintable>)"),
    ],
)
def test_an_import_that_fails_with_an_unprintable_exception_is_named(write: Write, code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_handler("emails", f"{write(UNPRINTABLE + code)}:handle")


@pytest.mark.parametrize(
    ("decorated", "said"),
    [
        ("@marq.handler\ndef handle(message): ...", "@marq.handler needs the name of a queue"),
        ('@marq.handler("q", leese=3)\ndef handle(message): ...', "handler() has no keyword 'leese'"),
        ('@marq.handler("q", lease=0)\ndef handle(message): ...', "@marq.handler('q'): lease: expected a number"),
        ('@marq.handler("q")\ndef handle(a, b, c): ...', ":handle(a, b, c): expected a function that takes a message"),
    ],
)
def test_what_marq_refuses_is_shown_with_the_line_and_without_the_code_of_marq(
    write: Write, decorated: str, said: str
) -> None:
    module = write(f"import marq\n\n{decorated}\n")

    with pytest.raises(ConfigError) as caught:
        load_modules((module,))

    assert f"{module!r} can't be imported: {module}.py, line 3: " in str(caught.value)
    assert said in str(caught.value)
    assert not hasattr(caught.value, "__notes__")


def test_a_module_that_ends_the_process_is_told_to_guard_its_program(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"it ends the process \(SystemExit\(3\)\); move .* below if __name__"):
        load_modules((write("import sys\nsys.exit(3)\n"),))


def test_a_module_without_anything_for_a_worker_is_named(write: Write) -> None:
    sources = {
        "only_a_handler": 'import marq\n@marq.handler("q")\ndef handle(message): ...\n',
        "only_a_lifespan": "import marq\n@marq.lifespan\nasync def pool(): yield\n",
        "decorator_forgotten": "def handle(message): ...\n",
    }
    for name, source in sources.items():
        write(source, name)

    assert without_handlers(tuple(sources)) == ["decorator_forgotten"]


def test_the_modules_of_a_package_can_be_named_instead_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop_of_the_test"
    package.mkdir()
    for name in ("__init__", "mail", "orders"):
        (package / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert modules_in("shop_of_the_test") == ["shop_of_the_test.mail", "shop_of_the_test.orders"]
    assert modules_in("shop_of_the_test.mail") == []


def test_a_queue_whose_handler_can_not_be_had_is_left_out_with_a_line_in_the_log(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    there = HandledQueue(f"{write('def handle(message): ...')}:handle", 1)
    nowhere = HandledQueue("nowhere_at_all:handle", 1)

    found = load_handlers(HandlerGroup("handlers", {"broken": nowhere, "emails": there}))

    assert list(found) == ["emails"]
    assert "queue 'broken': its handler 'nowhere_at_all:handle' can't be imported" in caplog.text
    with pytest.raises(ConfigError, match="queue 'broken'"):
        load_handlers(HandlerGroup("handlers", {"broken": nowhere}))


def test_the_handler_of_a_type_needs_only_the_codec_of_its_decorator(write: Write) -> None:
    module = write("""
import marq

class Order: ...

class Codec:
    def encode(self, value): return b""
    def decode(self, data): return Order()

@marq.handler("q", type="a", codec=Codec())
async def handle(order: Order): ...
""")

    codec = load_handlers_of("q", HandledQueue(None, 1, types={"a": f"{module}:handle"})).codec

    assert isinstance(codec, CodecsByType)
    assert type(codec.of("a")).__name__ == "Codec"


def test_handlers_are_surrounded_by_their_own_modules_and_those_that_the_worker_names(write: Write) -> None:
    sources = {
        "with_lifespan": "import marq\n@marq.lifespan\nasync def pool(): yield\n",
        "with_middleware": "import marq\n@marq.middleware\nasync def timed(message, call_next): ...\n",
        "with_both": "from with_lifespan import pool\nfrom with_middleware import timed\ndef handle(message): ...\n",
        "with_neither": "def handle(message): ...\n",
    }
    for name, source in sources.items():
        write(source, name)
    queues = {name: HandledQueue(f"{name}:handle", 1) for name in ("with_both", "with_neither", "not_loaded")}

    assert surrounding(tuple(sources)) == ("with_lifespan", "with_middleware", "with_both")
    modules = modules_around(HandlerGroup("handlers", queues, ("with_middleware",)), ["with_neither", "with_both"])
    assert [module.__name__ for module in modules] == ["with_middleware", "with_neither", "with_both"]
