"""What README.md and docs/ say can be done, can be done: code runs, links lead somewhere, settings exist."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from marq.settings.backoff import Backoff
from marq.settings.client import ClientOptions
from marq.settings.queue import CHECKS
from marq.wire.names import Names
from marq_worker.config.queues import load_queues
from marq_worker.config.settings import AppSettings, load_settings
from tests.docs.pages import OPERATIONS, PAGES, ROOT, Block, blocks
from tests.simulation.mutants import MUTANTS

LIMIT_SECONDS = 500
#: On the first line of a block that is only to be compiled: "```python compile-only".
COMPILE_ONLY = "compile-only"
#: On that of a block of tests: "```python pytest".
PYTEST = "pytest"
MARKDOWN = [*PAGES, *sorted((ROOT / "examples").rglob("*.md")), ROOT / "CHANGELOG.md"]
WRITTEN = [*MARKDOWN, *sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "examples").glob("*.toml"))]
FOLDERS = "tests|marq|marq_worker|agents|app|tables|config|lab|pipeline"
REGISTRIES = r"pypi|pythonhosted|maven\.org|repo1?\.maven|apache\.org/dist|nexus|artifactory"
FOR_OPERATORS = "\n".join(page.read_text(encoding="utf-8") for page in OPERATIONS)


def name_of(thing: Path | Block) -> str:
    return str(thing.relative_to(ROOT)) if isinstance(thing, Path) else thing.name


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- code -------------------------------------------------------------------------------------------------------------


def test_blocks_of_tests_pass(tmp_path: Path) -> None:
    # One process for all; a block that sets something for its whole process comes last.
    written = [block for block in blocks("python") if block.note == PYTEST]
    written.sort(key=lambda block: "set_tracer_provider" in block.code)
    files = [tmp_path / ("test_" + re.sub(r"\W", "_", block.name) + ".py") for block in written]
    for file, block in zip(files, written, strict=True):
        file.write_text(block.code, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MARQ_", "PYTEST_"))}
    options = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error"]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *files],
        cwd=tmp_path, env={**kept, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        check=False,
    )  # fmt: skip

    assert len({block.page for block in written}) > 5
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", blocks("python"), ids=name_of)
def test_a_block_of_python_compiles_or_is_part_of_a_program(block: Block) -> None:
    if block.note.startswith("examples/"):
        # A part of a program, which other tests run.
        assert block.code in (ROOT / block.note).read_text(encoding="utf-8")
    else:
        assert block.note in ("", COMPILE_ONLY, PYTEST)
        compile(block.code, block.name, "exec")


@pytest.mark.parametrize("block", [example for example in blocks("python") if not example.note], ids=name_of)
def test_a_program_runs(
    block: Block, servers: str, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "block.py"
    program.write_text(block.code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", servers)
    monkeypatch.setenv("MARQ_PREFIX", names.prefix)

    runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize("block", blocks("toml"), ids=name_of)
def test_a_block_of_toml_defines_something(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("marq.toml").write_text(block.code, encoding="utf-8")

    settings = load_settings()
    read = load_queues(settings.queues_file)

    assert read.queues or read.schedules or settings.model_fields_set


@pytest.mark.parametrize("block", [*blocks("sh"), *blocks("json")], ids=name_of)
def test_a_block_of_shell_or_json_can_be_read(block: Block) -> None:
    if block.language == "json":
        json.loads(block.code)
        return
    done = subprocess.run(
        ["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def test_each_make_target_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for page in WRITTEN for target in re.findall(r"\bmake ([a-z]+)\b(?= |`|$)", _code(text_of(page)))}

    assert {"demo", "test", "broker", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def _code(text: str) -> str:
    """What stands in code spans and blocks of a page."""
    blocks_and_spans = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    return "\n".join(blocks_and_spans)


# --- links and names --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made from their text."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_each_page_is_found_from_the_readme() -> None:
    index = text_of(ROOT / "README.md").partition("## Documentation")[2]

    for page in PAGES[1:]:
        if page.parent.name in ("decisions", "operations", "recipes") and page.name != "README.md":
            assert f"]({page.name})" in text_of(page.parent / "README.md"), page.name
        else:
            assert f"]({page.relative_to(ROOT).as_posix()})" in index, page.name


def test_each_test_and_mutant_that_a_page_names_exists() -> None:
    mutants = {mutant.name for mutant in MUTANTS}
    tests = [found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of(page))]
    # Quoted texts of a paragraph, or row of a table, that speaks of mutants.
    parts = [part for page in PAGES for part in re.split(r"\n\n|\n(?=[|*])", text_of(page)) if "mutant" in part]
    named = {" ".join(name.split()) for part in parts for name in re.findall(r"\"([^\"]+)\"", part)}

    assert len(tests) > 5
    assert len(named) > 5
    for path, function in tests:
        assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            function
        )
    assert named <= mutants
    for page in PAGES:
        for path in re.findall(
            r"`((?:tests|marq|agents|app|tables|config|lab|broker|pipeline)/[\w/.\-]+)`",
            text_of(page),
        ):
            assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_no_page_names_a_registry_or_a_path_of_one_machine(page: Path) -> None:
    text = text_of(page)

    assert not re.search(REGISTRIES, text, re.IGNORECASE)
    assert not re.search(r"(?<![\w.])/(?:home|root|work|Users|tmp|usr|opt|var|mnt)/\w", text)


# --- settings ---------------------------------------------------------------------------------------------------------


def described() -> dict[str, list[list[str]]]:
    """Rows of the tables of settings: variable -> the cells of each of its rows."""
    rows: dict[str, list[list[str]]] = {}
    for line in FOR_OPERATORS.splitlines():
        found = re.match(r"\| `(MARQ_[A-Z_]+)` \|(.+)\|$", line)
        if found:
            rows.setdefault(found[1], []).append([cell.strip() for cell in found[2].split("|")])
    return rows


def test_every_setting_is_described_and_nothing_else() -> None:
    worker = {f"MARQ_{name.upper()}" for name in AppSettings.model_fields}
    client = {f"MARQ_{name.upper()}" for name in ClientOptions.__annotations__} - {"MARQ_SSL_CONTEXT"}
    broker = {"MARQ_CACHE", "MARQ_BROKER_HEAP", "MARQ_MAVEN_REPOSITORY"}

    assert set(described()) == worker | client | broker | {"MARQ_BOOTSTRAP_SERVERS"}
    assert {name for name, rows in described().items() if len(rows) == 2} == (
        worker & client | {"MARQ_BOOTSTRAP_SERVERS"}
    )


@pytest.mark.parametrize("name", AppSettings.model_fields)
def test_a_default_of_the_worker_is_the_one_described(name: str) -> None:
    default = AppSettings.model_fields[name].default
    said = described()[f"MARQ_{name.upper()}"][0][0].strip("`")

    if isinstance(default, frozenset):
        assert set(said.split(",")) == default
    else:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        shown = shown.lower() if isinstance(default, bool) else shown
        assert said == ("none" if default in (None, ()) else shown)


def test_every_key_of_a_queue_is_described() -> None:
    keys = {name for name in CHECKS if name != "backoff"} | {f"backoff.{field.name}" for field in fields(Backoff)}
    keys = {name.removesuffix("_ms") for name in keys}

    said = set(re.findall(r"^\| `([a-z_.]+)` \| .* \| (?:handlers|tracker|all) \|$", FOR_OPERATORS, re.MULTILINE))
    assert said == keys
