"""Fake programs for a machine that is as a test wants it."""

import sys
from pathlib import Path


def shell_script(path: Path, body: str) -> Path:
    return _executable(path, f"#!/bin/sh\n{body}\n")


def python_script(path: Path, body: str) -> Path:
    return _executable(path, f"#!{sys.executable}\n{body}\n")


def fake_java(path: Path, version: str) -> Path:
    """A `java` that says it is of this version, and does nothing else."""
    return shell_script(path, f"""echo 'openjdk version "{version}" 2024-01-16' >&2""")


def _executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
