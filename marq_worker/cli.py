"""The command ``marq``: the worker, the tools for development, and the commands of :mod:`marq_worker.app.commands`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from marq_worker.app import commands

LEVELS = click.Choice(["debug", "info", "warn", "error", "crit"])
SHELLS = click.Choice(["bash", "zsh", "fish"])


class Marq(click.Group):
    """The commands in sections; those of ``app.commands`` are imported when they are needed."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for names in self._sections().values() for name in names]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if any(name in names for names in commands.SECTIONS.values()):
            return commands.load(name)
        return super().get_command(context, name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self._sections().items():
            loaded = [(name, self.get_command(context, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, each.get_short_help_str(200)) for name, each in loaded if each is not None])

    def _sections(self) -> dict[str, Sequence[str]]:
        return {"Run": tuple(self.commands), **commands.SECTIONS}


@click.group(cls=Marq, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="marq")
def cli() -> None:
    """Message queues on Apache Kafka.

    Settings come from MARQ_... in the environment, from .env, and from [settings] in ./marq.toml, which also defines
    queues.
    """


@cli.command()
def init() -> None:
    """Write marq.toml, tasks.py with a handler, and test_tasks.py into this directory."""
    from marq_worker.project import write_project

    with _without_traceback():
        for path in write_project(Path()):
            click.echo(f"wrote {path}")
    click.echo("next: marq dev")


@cli.command()
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@click.option("--data", type=click.Path(path_type=Path), default=Path(".marq/broker"), show_default=True)
@click.option("-l", "--loglevel", type=LEVELS, default="warn", show_default=True)
def dev(modules: Sequence[str], data: Path, loglevel: str) -> None:
    """Start a broker and a worker with the handlers of MODULE, and restart the worker when files change.

    If MARQ_BOOTSTRAP_SERVERS is set, it uses that broker instead of starting one. The broker's data stays in --data.
    """
    from marq_worker.dev import develop

    with _without_traceback():
        sys.exit(develop(modules, data, loglevel))


@cli.command()
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@click.option("-l", "--loglevel", type=LEVELS, default="info", show_default=True)
@click.option("--without-web", is_flag=True, help="Serve no dashboard and no metrics.")
@click.option("--quiet", is_flag=True, help="Print no table of settings at the start.")
def worker(modules: Sequence[str], loglevel: str, without_web: bool, quiet: bool) -> None:
    """Run a worker with the handlers of MODULE, or of those in MARQ_HANDLERS."""
    if modules:
        os.environ["MARQ_HANDLERS"] = ",".join(modules)
    from faust.cli.faust import cli as faust

    from marq_worker import app

    # Create it now: Faust would put the current directory first on the path while it imports.
    _ = app.app
    before = ["--quiet"] if quiet else []
    after = ["--without-web"] if without_web else []
    faust.main([*before, "-A", "marq_worker.app", "worker", "-l", loglevel, *after], prog_name="marq")


@cli.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path(".marq/broker"), show_default=True)
def broker(data: Path) -> None:
    """Run Kafka in the foreground, on MARQ_BOOTSTRAP_SERVERS or 127.0.0.1:9092; for development only."""
    from marq_worker.broker.__main__ import run
    from marq_worker.config.settings import read_environment

    with _without_traceback():
        sys.exit(run(data, address=read_environment().get("MARQ_BOOTSTRAP_SERVERS")))


@cli.command()
@click.argument("shell", type=SHELLS)
def completion(shell: str) -> None:
    """Print a script that completes commands and options: eval "$(marq completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells above"
    click.echo(kind(cli, {}, "marq", "_MARQ_COMPLETE").source())


@contextmanager
def _without_traceback() -> Iterator[None]:
    from marq.wire.errors import MarqError
    from marq_worker.broker.errors import BrokerError

    try:
        yield
    except (MarqError, BrokerError) as error:
        raise click.ClickException(str(error)) from error


def main() -> NoReturn:
    cli(prog_name="marq")
    raise AssertionError("click exits")
