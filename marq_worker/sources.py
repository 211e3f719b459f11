"""The files that a project's handlers import, found by reading them: a change of one restarts ``marq dev``'s worker.

Nothing is imported for it. Imports inside functions count, and so does text that names a module, because that is how
plugins are often loaded. A file that is imported by a computed name is not found.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def imported_files(modules: Iterable[str]) -> set[Path] | None:
    """Return the files below the working directory that modules import, with their own.

    None if a module is not below it: then its files can't be told from others.
    """
    roots = [Path(), *_further_roots()]
    files: set[Path] = set()
    for module in modules:
        own = set(_files_of(module, roots))
        if not own:
            return None
        _add(own, roots, files)
    return files


def _add(found: Iterable[Path], roots: list[Path], files: set[Path]) -> None:
    left = list(found)
    while left:
        path = left.pop()
        if path not in files:
            files.add(path)
            left += [file for name in _names_in(path, roots) for file in _files_of(name, roots)]


def _files_of(name: str, roots: list[Path]) -> Iterator[Path]:
    """Yield the files that the import of a module executes: its packages' and its own."""
    parts = name.split(".")
    for root in roots:
        for count in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:count])
            for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                if file.is_file():
                    yield file


def _names_in(path: Path, roots: list[Path]) -> Iterator[str]:
    """Yield the names in a file that may be modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the worker reports it; its imports are found after the next change
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [_package(path, node.level, roots), node.module]))
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if all(part.isidentifier() for part in name.split(".")):
                yield name


def _package(path: Path, level: int, roots: list[Path]) -> str:
    """Return the package that a relative import of a level starts from, "" for an absolute import."""
    if not level:
        return ""
    folder = path.parents[level - 1] if level <= len(path.parents) else path.parent
    # The innermost root: src/shop/mail.py is shop.mail if src is one.
    below = [folder.relative_to(root) for root in roots if folder.is_relative_to(root)]
    return ".".join(min(below, key=lambda path: len(path.parts), default=Path()).parts)


def _further_roots() -> Iterator[Path]:
    """Yield the directories of the import path that are below the working directory, such as src, but no packages."""
    for entry in sys.path:
        if entry and Path(entry).is_relative_to(Path.cwd()):
            root = Path(entry).relative_to(Path.cwd())
            if root.parts and not any(part.startswith(".") or part == "site-packages" for part in root.parts):
                yield root
