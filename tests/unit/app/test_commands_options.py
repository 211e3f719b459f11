"""What all commands do with their options, by the command lines that they parse."""

from __future__ import annotations

import click
import pytest
from faust.cli.base import cli

from marq_worker import commands


@pytest.fixture(scope="module")
def parsers() -> dict[str, click.Command]:
    """Every command, by its name."""
    return {name: commands.load(name) for names in commands.SECTIONS.values() for name in names}


def parse(parser: click.Command, *arguments: str) -> dict[str, object]:
    context = click.Context(parser)
    parser.parse_args(context, list(arguments))
    return context.params


def test_an_option_with_one_value_that_is_given_twice_is_refused_by_every_command(
    parsers: dict[str, click.Command],
) -> None:
    single = [
        (parser, option)
        for parser in parsers.values()
        for option in parser.params
        if isinstance(option, click.Option) and not (option.is_flag or option.multiple)
    ]
    assert {"--from", "--since", "--limit", "--at", "--timeout"} <= {option.opts[0] for _, option in single}
    for parser, option in single:
        arguments = ["x" for parameter in parser.params if isinstance(parameter, click.Argument)]
        name = option.opts[0]

        with pytest.raises(click.UsageError, match=f"{name} was given 2 times"):
            parse(parser, *arguments, name, "1", f"{name}=1")


def test_options_that_may_be_repeated_and_flags_still_are(parsers: dict[str, click.Command]) -> None:
    given = parse(parsers["dead"], "emails", "--header", "a=1", "--header", "b", "--json", "--json")

    assert given["headers"] == ("a=1", "b")
    assert given["as_json"] is True


@pytest.mark.parametrize("name", ["cancel", "dead", "purge", "queue", "redrive", "replay"])
def test_every_command_that_asks_takes_yes(parsers: dict[str, click.Command], name: str) -> None:
    assert parse(parsers[name], "x", "--yes")["yes"] is True


def test_faust_has_the_same_commands(parsers: dict[str, click.Command]) -> None:
    before = dict(cli.commands)
    try:
        commands.attach()

        assert {name: cli.commands[name] for name in parsers} == parsers
    finally:
        cli.commands.clear()
        cli.commands.update(before)
