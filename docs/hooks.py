"""Hooks of MkDocs: pages from outside docs/, pages generated from code and examples, and links that fit the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Pages that stand elsewhere in the repository, and their places in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
    "examples/README.md": "examples/README.md",
}
#: Examples, each of which gets a page, and the languages of their code.
EXAMPLES = {".py": "python", ".toml": "toml"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")
#: Tests read words after a block's language, which Markdown does not know. A path becomes the block's title.
_INFO = re.compile(r"^(```\w+) (\S*).*$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """List the pages of a folder where the navigation names its README.md, and show the version."""
    from marq.version import VERSION

    config.nav = _expanded(config.nav)
    config.site_name = f"{config.site_name} {VERSION}"
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(inner) for title, inner in entry.items()}
    if not isinstance(entry, list):
        return entry
    pages: list[Any] = []
    for item in map(_expanded, entry):
        folder = str(item).removesuffix("/README.md") if isinstance(item, str) else ""
        if folder in ("", item):
            pages.append(item)
        else:
            files = sorted(f"{folder}/{path.name}" for path in (ROOT / "docs" / folder).glob("*.md"))
            files += [page for _, page in examples() if page.startswith(f"{folder}/")]
            pages.append({folder.capitalize(): [item, *(page for page in files if page != item)]})
    return pages


def examples() -> list[tuple[Path, str]]:
    """Return the programs and settings in examples/, each with its page."""
    found = [path for path in (ROOT / "examples").rglob("*.*") if path.suffix in EXAMPLES and path.stem != "__init__"]
    return sorted((path, f"{path.relative_to(ROOT)}.md") for path in found)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, target in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=site_links(text, source, target)))
    for target, text in reference_pages():
        files.append(File.generated(config, target, content=text))
    for path, target in examples():
        name, code = path.relative_to(ROOT / "examples"), path.read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=f"# {name}\n\n```{EXAMPLES[path.suffix]}\n{code}```\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt the links of a page of docs/. The search leaves out design decisions, which use the same words."""
    path = page.file.src_uri
    if path.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
    return markdown if page.file.generated_by else site_links(markdown, f"docs/{path}", path)


def on_page_content(html: str, **_: Any) -> str:
    """Show the references of docstrings, such as :class:`marq.Producer`, as code."""
    return _ROLE.sub(r"<code>\1</code>", html)


def site_links(text: str, source: str, target: str) -> str:
    """Return the text of the repository's file ``source`` for its place ``target`` in the site.

    Links to files outside the site become plain text.
    """
    linked = _outside_fences(text, lambda part: _LINK.sub(lambda link: _site_link(link, source, target), part))
    return _INFO.sub(lambda info: info[1] + (f' title="{info[2]}"' if "/" in info[2] else ""), linked)


def _outside_fences(text: str, change: Any) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _site_link(link: re.Match[str], source: str, target: str) -> str:
    image, text, address = link.groups()
    path, hash_sign, anchor = address.partition("#")
    if "://" in address or address.startswith("mailto:") or not path:
        return link[0]
    repository_path = os.path.normpath(Path(source).parent / path)
    place = OUTSIDE.get(repository_path)
    if place is None and repository_path.startswith("docs/") and (ROOT / repository_path).is_file():
        place = repository_path.removeprefix("docs/")
    if ROOT / repository_path in dict(examples()):
        place = f"{repository_path}.md"
    if place is None:
        return text
    return f"{image}[{text}]({os.path.relpath(place, Path(target).parent)}{hash_sign}{anchor})"


# --- reference --------------------------------------------------------------------------------------------------------


def reference_pages() -> Iterator[tuple[str, str]]:
    """Generate the reference pages: their places in the site, and their texts."""
    yield "reference/api.md", _api()
    yield "reference/settings.md", _settings()
    yield "reference/cli.md", _commands()
    yield "reference/metrics.md", _metrics()
    yield "reference/errors.md", _errors()


def _api() -> str:
    import marq

    names = [name for name in marq.__all__ if name not in {"BYTES", "JSON"}]
    return "# Library\n\n" + "\n".join(f"::: marq.{name}\n" for name in sorted(names, key=str.lower))


def _errors() -> str:
    import marq

    errors = sorted(
        (error for name in marq.__all__ if isinstance(error := getattr(marq, name), type)),
        key=lambda error: error.__name__,
    )
    lines = [
        f"| `marq.{error.__name__}` | `{error.__bases__[0].__name__}` | {_summary(error)} |"
        for error in errors
        if issubclass(error, Exception)
    ]
    return "# Errors\n\n| error | base | meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def _settings() -> str:
    from marq.settings.client import ClientOptions
    from marq.settings.queue import CHECKS
    from marq_worker.config.settings import AppSettings

    lines = ["# Settings", "", "## Workers", "", "| environment variable | default |", "|---|---|"]
    for name, field in AppSettings.model_fields.items():
        lines.append(f"| `MARQ_{name.upper()}` | {_default(field.default)} |")
    lines += ["", "## Clients", "", "Workers read these settings too.", ""]
    lines += ["| keyword argument | environment variable |", "|---|---|"]
    lines += [f"| `{name}` | `MARQ_{name.upper()}` |" for name in ClientOptions.__annotations__]
    lines += ["", "## Queues", "", "Keys of `[defaults]` and `[queues.NAME]`:", ""]
    lines += [f"- `{key}`" for key in CHECKS]
    return "\n".join([*lines, "", "[Operations](../operations/settings.md) explains each setting.", ""])


def _default(value: object) -> str:
    if isinstance(value, frozenset):
        return f"`{','.join(sorted(value))}`"
    return "" if value in (None, ()) else f"`{value}`"


def _commands() -> str:
    import click

    from marq_worker.cli import cli

    root = click.Context(cli, info_name="marq")
    parts = ["# Command line", ""]
    for name in sorted(cli.list_commands(root)):
        command = cli.get_command(root, name)
        context = command.make_context(name, [], parent=root, resilient_parsing=True)
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        parts += [f"## {name}", "", command.help or "", "", "```text", usage]
        options = [record for param in command.params if (record := param.get_help_record(context))]
        width = max((len(option) for option, _ in options), default=0)
        parts += ["", *(f"  {option:{width}}  {text}" for option, text in options)] if options else []
        parts += ["```", ""]
    return "\n".join(parts)


def _metrics() -> str:
    from marq_worker.web.metrics import WorkerMetrics, families

    lines = ["# Metrics", "", "`GET /metrics` of each worker returns these in the format of Prometheus.", ""]
    lines += ["| metric | type | meaning |", "|---|---|---|"]
    for family in families(WorkerMetrics([], ready=True)):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |")
    return "\n".join([*lines, ""])


def _summary(thing: type) -> str:
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())
