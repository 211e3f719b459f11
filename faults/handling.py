"""A handler that writes its history into that of its worker: ``handler = "faults.handling:handle"``."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import marq
from faults.consumer import Death, Handler
from faults.recording import Recorder
from proof import history

#: In the environment: the file with the worker's history.
VARIABLE = "FAULTS_HISTORY"
WORK_SECONDS = 0.02


@functools.cache
def _recorder() -> Recorder:
    return Recorder("handlers", Path(os.environ[VARIABLE]))


async def handle(message: marq.Message) -> None:
    """Acknowledge a message."""
    recorder, lease = _recorder(), message._lease
    names = {"holder": history.holder_name(lease.holder), "source": history.log_name(lease.source)}
    # Its ACQUIRE is durable by now, or it would not be here.
    for type_ in ("invoke", "ok"):
        recorder.add(type_, "acquire", **names, offsets=[message.offset])
    await Handler(recorder, Death(recorder, None, 1), WORK_SECONDS, "patient").handle(message)
