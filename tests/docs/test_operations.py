"""docs/operations/ names what a person on call may meet: each error, each line of the log that warns, each alarm."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest
import yaml

import marq
from marq.client.outcomes import Outcome
from marq.owner.engine import PositionLost
from marq.wire.errors import MarqError
from pipeline.errors import PipelineError
from tests.docs.pages import OPERATIONS, ROOT

PAGES = {page.name: page.read_text(encoding="utf-8") for page in OPERATIONS}
PAGE = PAGES["troubleshooting.md"]
PACKAGES = ("marq", "marq_worker", "app", "agents", "tables", "config")
#: Levels of messages that operators read.
LEVELS = {"warning", "error", "critical"}
#: Of a message in the log, this many words in a row must be on the page.
WORDS = 4


def words(text: str) -> list[str]:
    return [word.strip(".") for word in re.findall(r"[\w'().-]+", text)]


def said(text: str) -> bool:
    """Whether some words in a row of a message, between what is filled in, stand on the page."""
    parts = [words(part) for part in re.split(r"%[-+0-9.*]*[a-z]|\{[^}]*\}", text)]
    size = min(WORDS, max(map(len, parts)))
    runs = [part[at : at + size] for part in parts for at in range(len(part) - size + 1)]
    return any(" ".join(run) in FLAT for run in runs)


FLAT = " ".join(words(PAGE.replace("…", " ")))


def logged() -> Iterator[tuple[str, str]]:
    """Where something is logged that people should know, and its message."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.is_relative_to(ROOT / "marq" / "testing"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(func=ast.Attribute(attr=level), args=[ast.Constant(value=str(text)), *_]) if (
                        level in LEVELS and isinstance(node.func, ast.Attribute) and _is_log(node.func.value)
                    ):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text
                    case ast.Call(func=ast.Name("RepeatedWarning"), args=[ast.Constant(value=str(text))]):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _is_log(node: ast.expr) -> bool:
    return ast.unparse(node) in {"log", "self.log"}


MESSAGES = [message for message in logged() if words(message[1].replace("%s", ""))]


@pytest.mark.parametrize(("where", "text"), MESSAGES, ids=[where for where, _ in MESSAGES])
def test_what_the_log_warns_of_is_explained(where: str, text: str) -> None:
    assert said(text), text


def test_an_unexplained_line_would_be_found() -> None:
    texts = [text for _, text in MESSAGES]
    assert len(texts) > 40
    assert any(text.startswith("leases not renewed") for text in texts)
    assert not said("group %s: elephants were seen among the partitions of %s")


# --- errors -----------------------------------------------------------------------------------------------------------


def errors() -> dict[str, type[BaseException]]:
    """All public errors of the library, and that of the pipeline."""
    for module in pkgutil.walk_packages(marq.__path__, "marq."):
        importlib.import_module(module.name)
    found: dict[str, type[BaseException]] = {PipelineError.__name__: PipelineError, "MarqError": MarqError}
    found["Outcome"] = Outcome
    for parent in (MarqError, Outcome):
        pending = list(parent.__subclasses__())
        while pending:
            error = pending.pop()
            pending += error.__subclasses__()
            if error.__module__.startswith("marq."):
                found[error.__name__] = error
    return found


ERRORS = errors()
ROWS = dict(re.findall(r"^\| `(?:marq|pipeline)\.(?:[\w.]+\.)?(\w+)` \|[^|]+\| (\S.*) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_each_error_has_a_row_that_says_what_to_do(name: str) -> None:
    assert name in ROWS


def test_each_alarm_of_a_partition_is_explained() -> None:
    paths = ROOT / "marq" / "owner" / "engine.py", ROOT / "tables" / "leases.py"
    source = "".join([path.read_text(encoding="utf-8") for path in paths])
    raised = re.findall(rf"raise {PositionLost.__name__}\(\s*f\"(.+)\"", source)

    assert len(raised) == 3
    assert all(said(text) for text in raised)


# --- alert rules ------------------------------------------------------------------------------------------------------


def test_each_alert_that_is_shipped_is_on_the_page() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    names = re.findall(r"^\s+- alert: (\w+)$", rules, re.MULTILINE)

    assert len(names) > 5
    assert [name for name in names if f"`{name}`" not in PAGES["monitoring.md"]] == []


def test_no_alert_misses_what_a_counter_counted_before_its_first_scrape() -> None:
    """A worker that starts after an outage counts removed records at once, and increase() needs two samples."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    expressions = {rule["alert"]: rule["expr"] for group in rules for rule in group["rules"] if "for" not in rule}

    risen = {alert: re.findall(r"\bincrease\((\w+)\[(\w+)\]\)", text) for alert, text in expressions.items()}
    assert risen["MarqMessagesGone"]
    for alert, counters in risen.items():
        for counter, span in counters:
            assert f"{counter} unless {counter} offset {span}" in expressions[alert], alert


# --- the command check ------------------------------------------------------------------------------------------------


def quoted() -> list[str]:
    """What the page quotes of `marq check`."""
    table = PAGE.partition("| problem | output of")[2].partition("\n\n")[0]
    cells = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ") and not row.startswith("|--")]
    return [text for cell in cells for text in re.findall(r'"([^"]+)"', cell)]


def source() -> str:
    worker = ROOT / "marq_worker"
    elsewhere = ROOT / "marq" / "kafka" / "connection_diagnosis.py", worker / "web" / "conditions.py"
    files = [*sorted((worker / "check").glob("*.py")), *elsewhere]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    # Literals that follow each other are one, and what stands between braces is a name or a number.
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}", "…", joined)


def test_what_it_quotes_of_the_command_check_stands_in_the_source() -> None:
    found, said = quoted(), source()

    assert len(found) > 20
    for text in found:
        for part in filter(None, (piece.strip() for piece in text.split("…"))):
            assert part in said, f"{text!r}: {part!r} is not said"


# --- the map of the pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md"])
def test_the_map_lists_the_sections_of_each_page(name: str) -> None:
    listed = re.findall(rf"\[([^\]]+)\]\({re.escape(name)}(?:#[\w-]+)?\)", PAGES["README.md"].partition("|---|")[2])

    text = re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.MULTILINE | re.DOTALL)
    assert listed == re.findall(r"^##? (.+)$", text, re.MULTILINE)
