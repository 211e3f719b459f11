"""The settings of a queue that a test expects, from the document that says so."""

from __future__ import annotations

from typing import Any

from marq.settings.effective_settings import EffectiveSettings
from marq.settings.queue import check_document, queue_settings


def effective(**document: Any) -> EffectiveSettings:
    """Return the settings in effect where a document says this and nothing else does."""
    return EffectiveSettings.of(queue_settings(check_document(document, "expected")))
