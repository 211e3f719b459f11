from __future__ import annotations

import pytest

from marq.wire.errors import ConfigError
from marq_worker.fatal_errors import end_with


def test_a_process_that_cannot_start_ends_with_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^marq: no such queue$"):
        end_with(ConfigError("no such queue"))


def test_the_traceback_of_a_handler_module_comes_before_the_sentence() -> None:
    error = ConfigError("module 'tasks' can't be imported")
    error.add_note("Traceback of tasks.py")

    with pytest.raises(SystemExit, match=r"^Traceback of tasks\.py\nmarq: module 'tasks' can't be imported$"):
        end_with(error)
