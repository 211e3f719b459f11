"""The command ``marq``: its help, the files of a new project, and what it reads from marq.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from marq_worker.app import commands
from marq_worker.cli import cli


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


def test_an_unknown_command_is_refused(runner: CliRunner) -> None:
    refused = runner.invoke(cli, ["que"])

    assert refused.exit_code == 2
    assert "No such command 'que'" in refused.output


def test_a_project_is_written_once(runner: CliRunner, tmp_path: Path) -> None:
    first = runner.invoke(cli, ["init"])
    (tmp_path / "tasks.py").write_text("mine\n")
    second = runner.invoke(cli, ["init"])

    assert first.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marq.toml", "tasks.py", "test_tasks.py"]
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
