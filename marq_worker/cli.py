"""The command ``marq``: the worker, the tools for development, and the commands of :mod:`marq_worker.commands`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from marq_worker import commands

#: Exit code after Ctrl-C, as in a shell.
INTERRUPTED = 130
SHELLS = click.Choice(["bash", "zsh", "fish"])
PORT = click.IntRange(1, 65_535)
Function = TypeVar("Function", bound=Callable[..., Any])


DATA = click.option(
    "--data", type=click.Path(path_type=Path), default=Path(".marq/broker"), show_default=True,
    help="Directory of the broker's data, kept between runs.",
)  # fmt: skip


def _loglevel(default: str) -> Callable[[Function], Function]:
    levels = click.Choice(["debug", "info", "warn", "error", "crit"])
    text = "Minimum level of log lines."
    return click.option("-l", "--loglevel", type=levels, default=default, show_default=True, help=text)


class Marq(click.Group):
    """The commands in sections; those of :mod:`marq_worker.commands` are imported when they are needed."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for names in self._sections().values() for name in names]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if any(name in names for names in commands.SECTIONS.values()):
            return commands.load(name)
        return super().get_command(context, name)

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, arguments)
        except click.UsageError as error:
            if close := difflib.get_close_matches(arguments[0], self.list_commands(context), n=1):
                error.message = f"{error.message.rstrip('.')}; did you mean {close[0]!r}?"
            raise

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self._sections().items():
            loaded = [(name, self.get_command(context, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, command.get_short_help_str(200)) for name, command in loaded if command is not None]
                )

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
    """Write marq.toml, tasks.py with a handler, and test_tasks.py to the current directory."""
    from marq_worker.new_project import write_project

    with _without_traceback():
        for path in write_project(Path()):
            click.echo(f"wrote {path}")
    click.echo("next: marq dev")


@cli.command()
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@DATA
@click.option("--port", type=PORT, help="Port of the broker (default: 9092, or the next free one).")
@click.option("--web-port", type=PORT, help="Port of the dashboard (default: MARQ_WEB_PORT, or the next free one).")
@_loglevel("warn")
def dev(modules: Sequence[str], data: Path, port: int | None, web_port: int | None, loglevel: str) -> None:
    """Start a broker and a worker with the handlers of MODULE, and restart the worker when their files change.

    Without MODULE it runs the handlers of those in MARQ_HANDLERS. If MARQ_BOOTSTRAP_SERVERS is set, it uses that broker
    instead of starting one, and waits for it. Each directory has a namespace of its own, which commands in the
    directory use while it runs.
    """
    from marq_worker.dev import Ports, develop

    with _without_traceback():
        sys.exit(develop(modules, data, loglevel, Ports(port, web_port)))


@cli.command()
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@_loglevel("info")
@click.option("--without-web", is_flag=True, help="Do not serve the dashboard and metrics.")
@click.option("--quiet", is_flag=True, help="Do not print the settings at startup.")
@click.option("--faust-log", is_flag=True, hidden=True)
def worker(modules: Sequence[str], loglevel: str, without_web: bool, quiet: bool, faust_log: bool) -> None:
    """Run a worker with the handlers of MODULE, or of those in MARQ_HANDLERS."""
    if modules:
        os.environ["MARQ_HANDLERS"] = ",".join(modules)
    with _without_traceback():
        _check_start()
    from faust.cli.faust import cli as faust

    from marq_worker import app

    # Create it now: Faust would put the current directory first on the path while it imports.
    created = app.app
    created.quiet, created.faust_log = quiet, faust_log or loglevel == "debug"
    before = [] if created.faust_log and not quiet else ["--quiet"]
    after = ["--without-web"] if without_web else []
    faust.main([*before, "-A", "marq_worker.app", "worker", "-l", loglevel, *after], prog_name="marq")


@cli.command()
@DATA
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


def _check_start() -> None:
    """Find simple mistakes now: later, log lines of a start and a stop would precede their errors."""
    from marq_worker.config.queues import load_queues
    from marq_worker.config.settings import HANDLERS_PROCESS, load_settings
    from marq_worker.handlers.handler_modules import check_exists

    # A handlers process gets its settings from its worker, because the file may have changed since.
    if HANDLERS_PROCESS not in os.environ:
        settings = load_settings()
        load_queues(settings.queues_file, None, settings.project)
        for module in settings.handlers:
            check_exists(module)


@contextmanager
def _without_traceback() -> Iterator[None]:
    from marq.wire.errors import MarqError
    from marq_worker.broker.errors import BrokerError
    from marq_worker.fatal_errors import end_with

    try:
        yield
    except (MarqError, BrokerError) as error:
        end_with(error)


def main() -> NoReturn:
    cli(prog_name="marq")
    raise AssertionError("click exits")
