"""Rules about the code itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("marq", "marq_worker", "app", "agents", "tables", "config", "pipeline", "lab", "examples")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
#: The modules that make decisions, and the data for them; clients' settings are read from the environment,
#: and some settings are times.
CORE = sorted(
    path
    for package in ("core", "owner", "settings", "wire")
    for path in (ROOT / "marq" / package).rglob("*.py")
    if path.name not in ("client.py", "cron.py", "durations.py", "pauses.py")
)
#: Modules with a clock, chance, tasks or I/O: the core takes time as an argument and returns its effects.
IMPURE = {"time", "random", "asyncio", "os", "logging", "datetime", "secrets", "socket", "threading", "uuid"}
EFFECTS = {"open", "print", "input", "__import__"}
#: Words that say nothing about what a file holds, and one that means two opposite things in two queue systems.
BANNED_FILE_WORDS = {"nack", "utils", "util", "helpers", "helper", "common", "manager", "misc"}
BANNED_IDENTIFIERS = {"nack"}
#: Hosts of package registries: which one is used is the machine's setting.
REGISTRIES = r"pypi\.org|pythonhosted\.org|maven\.org|repo1?\.maven|npmjs\.(com|org)|docker\.io|ghcr\.io|quay\.io"
#: Delivered files other than Python modules.
OTHER_FILES = [
    *(ROOT / name for name in ("Makefile", "Procfile", "pyproject.toml", "requirements.lock")),
    *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".pyc"),
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative imports hide dependencies"
            found.add(node.module or "")
    return found


@cache
def words(name: str) -> set[str]:
    """The words of an identifier or file name: ``queue_utils`` has two, ``HttpManager`` too."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


@cache
def identifiers(path: Path) -> set[str]:
    values = (getattr(node, field, None) for node in nodes(path) for field in ("id", "attr", "name", "arg"))
    return {value for value in values if isinstance(value, str)}


def is_core_or_standard(module: str) -> bool:
    ours = (f"marq.{package}." for package in ("core", "owner", "settings", "wire"))
    return f"{module}.".startswith(tuple(ours)) or module.split(".")[0] in sys.stdlib_module_names


def test_the_core_imports_only_itself_and_the_standard_library() -> None:
    foreign = [(name_of(path), module) for path in CORE for module in imports(path) if not is_core_or_standard(module)]

    assert foreign == []


def test_the_core_has_no_clock_no_chance_and_no_effects() -> None:
    impure = [(name_of(path), module) for path in CORE for module in imports(path) if module.split(".")[0] in IMPURE]
    effects = [(name_of(path), name) for path in CORE for name in identifiers(path) & EFFECTS]

    assert (impure, effects) == ([], [])


def test_importing_the_core_imports_nothing_impure() -> None:
    program = (
        "import sys, types; sys.path.insert(0, sys.argv[1]); package = types.ModuleType('marq');"
        "package.__path__ = [sys.argv[1] + '/marq']; sys.modules['marq'] = package;"
        "import marq.core.tracker, marq.core.deliveries.redelivery_records, marq.wire.names;"
        "print(sorted({'asyncio', 'logging', 'random', 'faust', 'aiokafka'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(ROOT)], capture_output=True, text=True, check=True, timeout=180
    )

    assert done.stdout.strip() == "[]"


def test_files_and_identifiers_are_named_by_what_they_are() -> None:
    parts = [(name_of(path), part) for path in MODULES for part in path.relative_to(ROOT).with_suffix("").parts]
    # A function that takes the place of a banned word may name it to refuse it, as text.
    used = [(name_of(path), name) for path in MODULES for name in identifiers(path)]

    assert [(path, part) for path, part in parts if words(part) & BANNED_FILE_WORDS] == []
    assert [(path, name) for path, name in used if words(name) & BANNED_IDENTIFIERS] == []


def test_packages_are_named_without_the_address_of_a_registry() -> None:
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in [*MODULES, *OTHER_FILES]}

    assert [name for name, text in texts.items() if re.search(REGISTRIES, text, re.IGNORECASE)] == []


def test_the_rules_look_at_something() -> None:
    assert len(CORE) > 8
    assert len(MODULES) > 20
    assert words("NackQueue_utils") == {"nack", "queue", "utils"}
