"""Words and phrases that documentation, comments and messages avoid, and what to write instead."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACTOR = "the actor's name: a consumer, a worker, the broker, a client, your handler, or you"
#: Pattern, in any case, and what to write instead. A line break counts as a space.
WORDS = {
    r"\bfor ever\b": "forever, for good",
    r"\banew\b": "again",
    r"\blest\b": "so that … not",
    r"\bas ever\b": "as usual",
    r"\bat the most\b": "at most",
    r"\bbeside\b": "next to, with",
    r"\bbut for\b": "except",
    r"\bthereof\b|\bbe it\b": "of it; whether",
    r"\bto be (?:had|seen|told|asked)\b": "an active verb",
    r"\b(?:it|this|that|which) (?:is|are|was|were) no (?!longer\b|more\b)": "is not a",
    r"(?:^|[.:;] )so (?:many|much|long)(?:,| of)": "the number",
    r"\b(?:exactly|most|for|with|among|after) so (?:many|much|long)\b(?! that)": "this many",
    r"(?:^|\. )who [a-z][^?]*?(?=[.:]|$)": ACTOR,
    r"\b(?:who|what)ever\b": ACTOR,
    r"\b(?:no|some|any|every)body\b": ACTOR,
    r"\b(?:he|him|his|himself)\b": ACTOR,
    r"\bmend(?:s|ed|ing)?\b": "repair, fix",
    r"\bcensus\b": "backlog counter",
    r"\brosters?\b": "offset snapshot",
    r"\brewind(?:s|ing)?\b|\brewound\b": "replay",
    r"\bgrace\b(?! period)": "shutdown_timeout",
    r"\bg(?:ives?|iven|ave|iving) (?:it |them |messages )?back\b": "release",
    r"\bhand(?:s|ed|ing)? (?:it |them )?out\b": "deliver",
    r"\bst(?:and(?:s|ing)?|ood) still\b|\bwedged\b": "stalled",
    r"\binstallations?\b": "namespace",
    r"\bfigures\b": "metrics, statistics, numbers",
    r"\brights\b": "permissions",
    r"\bstrangers?\b": "unknown queues",
    r"(?<!dead )(?<!dead-)(?<!dead_)\bletters?\b": "dead letters",
}
ANY = re.compile("|".join(WORDS), re.IGNORECASE)
#: File, text that is meant to be there, and why.
EXCEPTIONS = {
    ("CHANGELOG.md", "rewind"): "a former name",
    ("CHANGELOG.md", "grace"): "a former name",
    ("CHANGELOG.md", "rosters"): "a former name",
    ("CHANGELOG.md", "letters"): "a former name",
}
TEXT = re.compile(r"\.(?:md|py|toml|ya?ml|tpl|txt|html)$|(?:^|/)(?:Makefile|Procfile)$")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PARAGRAPH = re.compile(r"(?:[^\n]+\n?)+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Passage = tuple[int, str]


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    vendored = re.compile(r"/vendor/|\.lock$|^tests/docs/test_words\.py$")
    return [name for name in listed if TEXT.search(name) and not vendored.search(name)]


def _passages(name: str) -> Iterator[Passage]:
    """Yield each paragraph, comment, docstring and text with its line; in tests, strings are data."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".py"):
        text = FENCED.sub(lambda code: "\n" * code[0].count("\n"), text)
        yield from ((text.count("\n", 0, found.start()) + 1, found[0]) for found in PARAGRAPH.finditer(text))
        return
    nodes = list(ast.walk(ast.parse(text)))
    bodies = [node.body[0] for node in nodes if isinstance(node, DOCUMENTED) and node.body]
    docstrings = [body.value for body in bodies if isinstance(body, ast.Expr)]
    for node in docstrings if name.startswith("tests/") else nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    yield from _comments(text)


def _comments(text: str) -> Iterator[Passage]:
    block: list[str] = []
    began = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            began = began or token.start[0]
            block.append(token.string.lstrip("#: "))
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and block:
            yield began, "\n".join(block)
            block, began = [], 0


def complaints(name: str, passages: Iterable[Passage]) -> list[str]:
    flat = ((line, re.sub(r"\s*\n\s*", " ", text)) for line, text in passages)
    return [
        f"{name}:{line}: {found[0].strip()!r}: write {better}"
        for line, text in flat
        if ANY.search(text)
        for pattern, better in WORDS.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
        if (name, found[0].strip()) not in EXCEPTIONS
    ]


def test_prose_uses_plain_words() -> None:
    found = [complaint for name in _files() for complaint in complaints(name, _passages(name))]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Whoever comes first", "the lease is kept for\never", "a record that is no marker", "messages are handed out",
        "All letters of a queue", "the installation's topics", "the consumer gives it back", "Later. Who waits gets it",
    ],
)  # fmt: skip
def test_each_kind_of_text_is_found(text: str) -> None:
    assert complaints("x.md", [(1, text)])


@pytest.mark.parametrize(
    "text", ["a dead letter", "no longer", "Who owns partition 3?", "there is no consumer", "given"]
)
def test_plain_sentences_pass(text: str) -> None:
    assert complaints("x.md", [(1, text)]) == []


def test_every_exception_is_needed() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8").lower() for name, _ in EXCEPTIONS}

    assert [(name, text) for name, text in EXCEPTIONS if text not in texts[name]] == []
