"""The command ``marq``: its help, the files of a new project, and what it reads from marq.toml."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from marq_worker import commands
from marq_worker.cli import cli
from marq_worker.new_project import project_name


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_help_shows_every_command_in_its_section(runner: CliRunner) -> None:
    shown = runner.invoke(cli, ["--help"])

    assert shown.exit_code == 0
    sections = {"Run": ("init", "dev", "worker", "broker", "completion"), **commands.SECTIONS}
    rest = shown.output
    for title, names in sections.items():
        _, found, rest = rest.partition(f"\n{title}:\n")
        assert found, title
        assert [line.split()[0] for line in rest.partition("\n\n")[0].splitlines() if line[2] != " "] == list(names)


def test_every_command_has_help_and_those_that_print_data_have_json(runner: CliRunner) -> None:
    for names in commands.SECTIONS.values():
        for name in names:
            shown = runner.invoke(cli, [name, "--help"])

            assert shown.exit_code == 0, name
            assert ("--json" in shown.output) is (name != "web-password"), name


@pytest.mark.parametrize(("directory", "name"), [("My Shop!", "my-shop"), ("été.v2", "t-.v2"), ("日本", "project")])
def test_a_project_is_named_after_its_directory(directory: str, name: str) -> None:
    assert project_name(Path("/srv") / directory) == name


def test_an_unknown_command_is_refused(runner: CliRunner) -> None:
    refused, mistyped = runner.invoke(cli, ["x"]), runner.invoke(cli, ["quees"])

    assert (refused.exit_code, mistyped.exit_code) == (2, 2)
    assert "No such command 'x'.\n" in refused.output
    assert "No such command 'quees'; did you mean 'queues'?\n" in mistyped.output


def test_ctrl_c_while_a_command_is_imported_is_no_error_of_the_program(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load", interrupted)

    ended = runner.invoke(cli, ["queues"])

    assert (ended.exit_code, ended.output) == (130, "")


def test_a_name_above_the_tables_is_refused_with_its_place(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "marq.toml").write_text('project = "shop"\n')

    ended = runner.invoke(cli, ["worker"])

    assert ended.output == "marq: marq.toml: project is a setting: write it below [settings]\n"


def test_a_wrong_definition_ends_the_worker_before_it_starts(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "marq.toml").write_text("[queues.emails]\nlease = -3\n")

    ended = runner.invoke(cli, ["worker"])

    assert ended.exit_code == 1
    assert ended.output == (
        "marq: marq.toml: [queues.emails]: lease: expected a number of seconds above 0, to 4294967, not -3\n"
    )


def test_the_command_of_a_plain_library_says_what_to_install(tmp_path: Path) -> None:
    # A module that is None in sys.modules can't be imported.
    program = "import sys; sys.modules['click'] = None; from marq_worker.__main__ import main; main()"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 1
    assert ended.stderr.startswith("marq: the command needs the packages of a worker (")
    assert ended.stderr.endswith("): pip install 'marq[worker]'\n")


def test_a_project_is_written_once(runner: CliRunner, tmp_path: Path) -> None:
    first = runner.invoke(cli, ["init"])
    (tmp_path / "tasks.py").write_text("mine\n")
    second = runner.invoke(cli, ["init"])

    assert first.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marq.toml", "tasks.py", "test_tasks.py"]
    assert f'project = "{project_name(tmp_path)}"' in (tmp_path / "marq.toml").read_text()
    assert second.exit_code == 1
    assert "marq.toml, tasks.py, test_tasks.py: already there" in second.output
    assert (tmp_path / "tasks.py").read_text() == "mine\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script_that_completes(runner: CliRunner, shell: str) -> None:
    script = runner.invoke(cli, ["completion", shell])

    assert script.exit_code == 0
    assert "_MARQ_COMPLETE" in script.output


def test_commands_are_completed(runner: CliRunner) -> None:
    environment = {"_MARQ_COMPLETE": "bash_complete", "COMP_WORDS": "marq de", "COMP_CWORD": "1"}

    completed = runner.invoke(cli, [], env=environment, prog_name="marq")

    assert {line.partition(",")[2] for line in completed.output.splitlines()} == {
        "delayed",
        "deliver-now",
        "dev",
        "dead",
    }


def test_a_wrong_setting_in_the_file_ends_a_command_with_one_sentence(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "marq.toml").write_text('[settings]\nbootstrap_server = "kafka:9092"\n')

    ended = runner.invoke(cli, ["queues"])

    assert ended.exit_code == 1
    assert ended.stderr == (
        "marq: marq.toml: [settings]: unknown setting 'bootstrap_server'; did you mean 'bootstrap_servers'?\n"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("web_port = 99999", r"\[settings\] web_port: .*less than or equal to 65535 \(found '99999'\)"),
        ("partitions = 0", r"\[settings\] partitions=0: expected a whole number from 1 to 10000"),
        ('bootstrap_servers = "kafka"', r"\[settings\] bootstrap_servers='kafka': expected host:port"),
        ('prefix = "my shop"', r"\[settings\] prefix: expected 1 to 100 of the characters"),
    ],
)
def test_a_wrong_value_of_the_project_file_is_named_as_it_is_written_there(
    runner: CliRunner, setting: str, text: str
) -> None:
    Path("marq.toml").write_text(f"[settings]\n{setting}\n")

    refused = runner.invoke(cli, ["queues"])

    assert refused.exit_code == 1
    assert re.match(rf"marq: marq\.toml: {text}", refused.stderr), refused.stderr


def test_a_worker_names_the_table_of_a_module_that_is_not_there_and_the_variable_that_overrides_it(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("marq.toml").write_text('[settings]\nhandlers = ["tsaks"]\nstop_timeout = 5\nshutdown_timeout = 60\n')
    settings = str(runner.invoke(cli, ["worker"]).exception)
    monkeypatch.setenv("MARQ_SHUTDOWN_TIMEOUT", "1")
    module = str(runner.invoke(cli, ["worker"]).exception)
    monkeypatch.setenv("MARQ_HANDLERS", "takss")
    variable = str(runner.invoke(cli, ["worker"]).exception)

    assert "marq.toml: [settings] shutdown_timeout: expected at most" in settings
    assert "lower it, or raise marq.toml: [settings] stop_timeout" in settings
    assert module.startswith("marq: marq.toml: [settings] handlers: module 'tsaks' can't be imported")
    assert variable.startswith("marq: MARQ_HANDLERS: module 'takss' can't be imported")
