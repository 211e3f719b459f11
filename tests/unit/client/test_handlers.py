"""The decorator of handlers, and the search for them in modules."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType

import pytest

from marq.client.codecs import JSON
from marq.client.send_targets import HandlerDefinition, definitions_of
from marq.handlers.decorator import by_queue, check_handler, handler, handlers_in
from marq.settings.queue import CHECKS, check_document, queue_settings
from marq.settings.queue_options import HandlerOptions
from marq.wire.errors import ConfigError


@pytest.fixture
def make_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Make an imported module of source text."""

    def make(source: str, name: str = "mail") -> ModuleType:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(
            compile("import marq.handlers.decorator as marq\n" + textwrap.dedent(source), name, "exec"), module.__dict__
        )
        return module

    return make


async def test_a_decorated_function_is_the_function_itself_and_can_be_called() -> None:
    async def send(message: object) -> str:
        return f"sent {message}"

    decorated = handler("emails")(send)

    assert decorated is send
    assert inspect.iscoroutinefunction(decorated)
    assert await decorated("hello") == "sent hello"


def test_the_definition_has_what_the_decorator_said() -> None:
    @handler("emails", concurrency=8, codec=JSON, group="background")
    def send(message: object) -> None: ...

    (definition,) = definitions_of(send)

    name = f"{__name__}:test_the_definition_has_what_the_decorator_said.<locals>.send"
    assert definition == HandlerDefinition("emails", send, name, JSON, {"concurrency": 8, "group": "background"})


def test_a_definition_says_of_its_queue_only_what_the_decorator_said(make_module) -> None:
    module = make_module("""
        @marq.handler("emails")
        def send(message): ...

        @marq.handler("letters", concurrency=2, group="post")
        def post(message): ...
    """)

    documents = {queue: each.document for queue, each in by_queue(handlers_in(module)).items()}

    assert documents == {
        "emails": {"handler": "mail:send"},
        "letters": {"handler": "mail:post", "concurrency": 2, "group": "post"},
    }
    for document in documents.values():
        check_document(document, "the handler")


def test_a_decorator_takes_the_settings_of_a_table_of_marq_toml(make_module) -> None:
    # given: each key but the handler, and durations as timedeltas
    given: dict[str, object] = {
        "lease": timedelta(minutes=2), "max_lease": 600, "max_attempts": 3, "backoff": [timedelta(seconds=1), 5],
        "errors": {"ValueError": "reject"}, "breaker": False, "dead_letter": True, "group": "post", "topic": "letters",
        "concurrency": 2, "delay": 0, "delivery": "at-least-once", "transactional": False, "partitions": 2,
        "paused": False, "ordering": "none", "on_dead_letter": "continue", "start": "earliest",
        "deduplication_window": 60, "shutdown_timeout": 5, "tracebacks": False, "key": "ordering",
        "limits": {"concurrency": 5}, "fair": False, "priority": 3,
        "expires_after": timedelta(hours=1), "expired": "dead-letter",
    }  # fmt: skip
    assert given.keys() == HandlerOptions.__annotations__.keys() == CHECKS.keys() - {"handler"}

    @handler("letters", **given)  # type: ignore[arg-type]
    def post(message: object) -> None: ...

    [definition] = definitions_of(post)
    plain = {"lease": 120.0, "backoff": [1.0, 5], "expires_after": 3600.0}
    assert definition.settings == {**given, **plain}
    assert queue_settings(definition.settings).lease_ms == 120_000


@pytest.mark.parametrize(
    ("queue", "settings", "said"),
    [
        ("emails", {"max_attempts": 0}, r"'emails'\): max_attempts: expected a whole number from 1 to 1000000"),
        ("emails", {"backoff": {"bas": 1}}, r"'emails'\): backoff\.bas: unknown key"),
        ("emails", {"lease": "30s"}, r"lease: expected a number of seconds above 0, to 4294967, not '30s'"),
        ("emails", {"concurrency": 0}, r"'emails'\): concurrency: expected a whole number"),
        ("emails", {"concurrency": "many"}, r"'emails'\): concurrency: expected a whole number"),
        ("emails", {"codec": "json"}, "codec"),
        ("emails", {"group": ""}, "a group's name must not be empty"),
        ("", {}, "a queue's name must not be empty"),
        (5, {}, "a queue's name"),
    ],
)
def test_a_wrong_setting_is_named_with_its_decorator(queue: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        handler(queue, **settings)  # type: ignore[arg-type]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_parentheses_the_decorator_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r'write @marq\.handler\("emails"\)'):

        @handler
        def send(message: object) -> None: ...


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("max_retries", "marq calls it max_attempts"),
        ("visibility_timeout", "marq calls it lease"),
        ("countdown", r"raise marq\.Retry\(delay=…\)"),
        ("concurency", "no keyword 'concurency'; did you mean 'concurrency'"),
        ("expires_in", "no keyword 'expires_in': marq calls it expires_after"),
        ("leese", "no keyword 'leese'; did you mean 'lease'"),
        ("handler", "unexpected keyword argument 'handler'"),
        ("colour", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_keyword_that_belongs_elsewhere_is_sent_there(keyword: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        handler("emails", **{keyword: 1})  # type: ignore[arg-type]


def test_the_same_queue_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue 'emails': .*send is decorated twice"):

        @handler("emails")
        @handler("emails")
        def send(message: object) -> None: ...


def generator(message: object):
    yield message


async def asynchronous_generator(message: object):
    yield message


class Mailer:
    def send(self, message: object) -> object:
        return self, message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("send_email", "expected a function"),
        (Mailer, "is a class; decorate its method"),
        (Mailer().send, "decorate the method in its class"),
        (staticmethod(print), "write @staticmethod above"),
        (generator, "it has a yield"),
        (asynchronous_generator, "it has a yield"),
    ],
)
def test_what_can_not_handle_a_message_is_refused(function, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        handler("emails")(function)


@pytest.mark.parametrize("function", ["send_email", Mailer, generator, Mailer.send])
def test_a_handler_must_accept_a_message(function) -> None:
    with pytest.raises(ConfigError, match="expected a function that takes a message"):
        check_handler(function)


# --- methods, partials, lambdas ---------------------------------------------------------------------------------------


def test_a_decorated_method_is_a_handler_on_each_instance() -> None:
    class Sender:
        @handler("emails")
        def send(self, message: object) -> object:
            return self, message

    sender = Sender()

    (definition,) = definitions_of(sender.send)
    assert definition.function("hello") == (sender, "hello")  # type: ignore[arg-type]


def test_a_static_method_above_the_decorator_is_a_handler() -> None:
    class Sender:
        @staticmethod
        @handler("emails")
        def send(message: object) -> object:
            return message

    assert definitions_of(Sender.send)[0].function("hello") == "hello"  # type: ignore[arg-type]


def test_a_module_with_a_decorated_method_and_no_instance_is_refused(make_module) -> None:
    module = make_module("""
        class Sender:
            @marq.handler("emails")
            def send(self, message): ...
    """)

    with pytest.raises(ConfigError, match=r"queue 'emails': .*mail:Sender\.send is a method.*send = Sender\(\)\.send"):
        handlers_in(module)


# --- modules ----------------------------------------------------------------------------------------------------------

SEND = """
@marq.handler("emails")
def send(message): ...
"""


@pytest.mark.parametrize(
    "value",
    [
        "lambda message: None",
        "functools.partial(lambda key, message: None, 5)",
        "type('Sender', (), {'__call__': lambda self, message: None})()",
        "functools.lru_cache(lambda message: None)",
    ],
)
def test_what_has_no_name_of_its_own_is_named_by_its_place(make_module, value: str) -> None:
    module = make_module(f"import functools\nsend = marq.handler('emails')({value})")

    (definition,) = handlers_in(module)

    assert (definition.name, definition.function) == ("mail:send", module.send)


@pytest.mark.parametrize(
    ("source", "handlers"),
    [
        ("from mail import send", {("emails", "mail:send", None)}),
        ("from mail import send as other, send as another", {("emails", "mail:send", None)}),
        (
            "@marq.handler('a')\n@marq.handler('b', concurrency=2)\ndef send(message): ...",
            {("a", "other:send", None), ("b", "other:send", 2)},
        ),
        (
            "class Sender:\n  @marq.handler('a')\n  def send(self, message): ...\nsend_email = Sender().send",
            {("a", "other:send_email", None)},
        ),
    ],
    ids=["imported", "imported twice", "of several queues", "method of an instance"],
)
def test_a_handler_counts_once_for_each_of_its_queues(make_module, source: str, handlers: set[object]) -> None:
    make_module(SEND)
    module = make_module(source, "other")

    found = handlers_in(module, module)

    assert len(found) == len(handlers)
    assert {(each.queue, each.name, each.settings.get("concurrency")) for each in found} == handlers


def test_two_handlers_for_one_queue_are_both_named(make_module) -> None:
    one = make_module("@marq.handler('emails')\ndef send(message): ...")
    two = make_module("@marq.handler('emails')\ndef send_too(message): ...", "two")

    with pytest.raises(ConfigError, match=r"queue 'emails' has two handlers, mail:send and two:send_too"):
        handlers_in(one, two)


def test_what_another_decorator_made_of_a_handler_is_what_runs(make_module) -> None:
    module = make_module("""
        import functools

        def timed(function):
            @functools.wraps(function)
            def call(message):
                return "timed", function(message)
            return call

        @timed
        @marq.handler("emails")
        def send(message):
            return message
    """)

    (definition,) = handlers_in(module)

    assert definition.function("hello") == ("timed", "hello")  # type: ignore[arg-type]
    assert definition.name == "mail:send"


def test_modules_without_handlers_and_with_strange_objects_have_none(make_module) -> None:
    module = make_module("""
        from unittest import mock

        class Proxy:
            def __getattr__(self, name):
                raise RuntimeError("working outside of context")

        proxy, call, mocked = Proxy(), mock.call, mock.Mock()
    """)

    assert handlers_in(module) == []


def test_a_partial_of_a_handler_is_not_the_handler() -> None:
    @handler("emails")
    def send(message: object) -> None: ...

    assert definitions_of(functools.partial(send)) == ()
