"""Points of clients that other modules wrap."""

from __future__ import annotations

from collections.abc import Callable

from marq.client import hooks


class Greeter:
    @hooks.point("test-greet")
    def greet(self, name: str) -> str:
        """Say hello."""
        return f"hello {name}"


def shout(greet: Callable[[Greeter, str], str]) -> Callable[[Greeter, str], str]:
    return lambda self, name: greet(self, name).upper()


def twice(greet: Callable[[Greeter, str], str]) -> Callable[[Greeter, str], str]:
    return lambda self, name: greet(self, name) * 2


def test_an_unwrapped_point_is_the_method_itself() -> None:
    assert type(vars(Greeter)["greet"]) is type(shout)
    assert Greeter().greet("you") == "hello you"


def test_wrappers_add_up_and_leave_nothing_behind() -> None:
    method = vars(Greeter)["greet"]
    ends = [hooks.wrap("test-greet", around) for around in (shout, twice)]

    assert Greeter().greet("you") == "HELLO YOUHELLO YOU"
    assert Greeter.greet.__doc__ == "Say hello."
    for end in reversed(ends):
        end()
    assert vars(Greeter)["greet"] is method
