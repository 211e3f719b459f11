"""Values of queue settings as text, as in marq.toml: for commands and pages."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from marq.settings.queue import SETTINGS
from marq.wire.errors import ConfigError
from marq_worker.readable import DURATION_FORM, read_duration

#: Settings whose values are names. Changing one may change which group reads the queue.
NAMED = frozenset({"group", "topic", "handler"})
#: Settings that are durations.
_DURATIONS = frozenset(key for key, setting in SETTINGS.items() if setting.unit)
#: Texts that need no quotes, such as ``dead-letter`` or ``10/s``, if they are nothing else in TOML.
_WORD = re.compile(r"[\w./:-]+")


def read_value(key: str, text: str, where: str) -> Any:
    """Parse the value of a setting, which is not checked; ``where`` begins errors: ``--set``, or a form."""
    if (key in NAMED or key == "key") and not text.startswith(("'", '"')):
        # A name; the shell removes quotes anyhow.
        return text
    if key in _DURATIONS and (duration_s := read_duration(text)) is not None:
        return int(duration_s) if duration_s.is_integer() else duration_s
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if key not in _DURATIONS and _WORD.fullmatch(text):
            return text
        form = DURATION_FORM if key in _DURATIONS else f"a value as in marq.toml: {error}"
        raise ConfigError(f"{where} {key}={text}: expected {form}") from error
    if len(document) > 1:
        raise ConfigError(f"{where} {key}={text}: expected one value")
    return document["value"]


def write_value(value: Any) -> str:
    """Return the text of a value; "none" if there is none."""
    if isinstance(value, Mapping):
        items = [
            f"{key if key.isidentifier() else json.dumps(key)} = {write_value(item)}" for key, item in value.items()
        ]
        return "{ " + ", ".join(items) + " }" if items else "{}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
