"""What we rely on of Faust, mode and aiokafka is still there, has the shape we know, and is listed completely."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import tomllib
from importlib.metadata import version
from typing import Any

import pytest

from marq_worker import agents, app, handlers, owner, tables, transport, watchdog, web
from marq_worker.check.machine import VERSIONS
from tests.worker.faust_reliances import RELIANCES, Reliance
from tests.worker.harness import ROOT

FOREIGN = ("faust", "mode", "aiokafka")
SOURCES = [
    path for folder in ("app", "tables", "agents", "marq_worker") for path in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = tuple(
    importlib.import_module(module.name)
    for package in (app, agents, handlers, owner, tables, transport, watchdog, web)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


def is_foreign(base: type) -> bool:
    return base.__module__.split(".")[0] in FOREIGN


SUBCLASSES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if inspect.isclass(value) and value.__module__ == module.__name__ and any(map(is_foreign, value.__mro__))
]


def load(owner: str) -> Any:
    module, _, name = owner.partition(":")
    return getattr(importlib.import_module(module), name)


def shape(owner: Any, name: str) -> str:
    """The shape of a class's name, in the words of faust_reliances.py."""
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        assigned = re.compile(rf"self\.{name}\b[^=\n]*=[^=]|^\s+{name}\s*:", re.MULTILINE)
        bases = [base for base in owner.__mro__ if is_foreign(base)]
        return "instance attribute" if any(assigned.search(inspect.getsource(base)) for base in bases) else "missing"
    if isinstance(found, property):
        return "property"
    if not inspect.isfunction(found):
        return "class attribute"
    signature = inspect.signature(found)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    if inspect.isasyncgenfunction(found):
        return f"async generator {text}"
    return f"async {text}" if inspect.iscoroutinefunction(found) else text


def fits(expected: str, found: str) -> bool:
    """Whether a shape is the expected one; an ellipsis stands for anything."""
    pattern = re.escape(expected).replace(re.escape("..."), ".*")
    return expected == "inherited" or re.fullmatch(pattern, found, re.DOTALL) is not None


def entry(reliance: Reliance) -> str:
    return f"{reliance.owner.partition(':')[2]}.{reliance.name}"


@pytest.mark.parametrize("reliance", RELIANCES, ids=entry)
def test_a_name_that_we_rely_on_has_the_shape_that_we_know(reliance: Reliance) -> None:
    found = shape(load(reliance.owner), reliance.name)

    assert found != "missing", f"{entry(reliance)} is gone: {reliance.why}"
    assert fits(reliance.shape, found), f"{entry(reliance)} is now {found}: {reliance.why}"


@pytest.mark.parametrize("package", VERSIONS)
def test_the_installed_version_is_the_one_that_was_read(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Without the extras that are asked for in brackets.
    pins = [
        re.sub(r"\[.*\]", "", pin) for pin in (*project["dependencies"], *project["optional-dependencies"]["worker"])
    ]

    assert version(package) == VERSIONS[package]
    assert f"{package}=={VERSIONS[package]}" in pins


@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda subclass: subclass.__name__)
def test_everything_that_we_override_is_listed(subclass: type) -> None:
    listed = {reliance.name for reliance in RELIANCES}
    bases = [base for base in subclass.__mro__ if is_foreign(base)]
    # What Python, typing and mode write into each class by themselves.
    ordinary = {"__module__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__"}
    # Since Python 3.13 and 3.14.
    ordinary |= {"__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"}
    generated = {"logger", "log", "abstract", "_tasks", "__orig_bases__"}

    overridden = {name for name in vars(subclass) if any(name in vars(base) for base in bases)} - ordinary - generated

    assert overridden <= listed, f"not in faust_reliances.py: {sorted(overridden - listed)}"


def private_names() -> set[str]:
    """Private attributes that our code touches and that it did not define itself."""
    used: set[str] = set()
    own: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                (own if is_own_field(node) else used).add(node.attr)
    return used - own


def is_own_field(node: ast.Attribute) -> bool:
    """Whether this sets a field of our own object: one that no class above it knows."""
    ours = isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return ours and not any(reliance.name == node.attr for reliance in RELIANCES)


#: Names of os, of sys and of named tuples.
PUBLIC_ALL_THE_SAME = {"_exit", "_current_frames", "_asdict", "_fields", "_replace"}
#: Of Python itself: ``atexit._run_exitfuncs``, which tests/unit/app/test_worker.py runs.
OF_PYTHON = {"_run_exitfuncs"}
#: Names of :class:`marq.Message` for the consumers of marq_worker/sqs/polling.py and deliveries.py.
OF_MESSAGES = {"_ack", "_expiry_s", "_offset"}


def test_every_private_name_that_we_touch_is_listed() -> None:
    listed = {reliance.name for reliance in RELIANCES}
    missing = private_names() - listed - PUBLIC_ALL_THE_SAME - OF_PYTHON - OF_MESSAGES

    assert missing == set(), f"not in faust_reliances.py: {sorted(missing)}"


def test_the_rules_look_at_something() -> None:
    assert len(SUBCLASSES) >= 9
    assert len(private_names()) >= 10
