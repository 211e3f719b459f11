"""kombu, on which Celery stands: its own integration tests for SQS pass against the endpoint."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sqs import environments
from tests.worker.harness import Worker

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]

LIMIT_SECONDS = 500
#: How often the marks of kombu's tests allow a rerun.
RERUNS = 5
#: Tests without such a mark: their failures count at once.
UNMARKED = r"::test_reject_|::test_SQSDelaySeconds::(?!test_delayed_message_is_withheld)"
#: A line of the summary: the outcome of a test and its name.
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)", re.MULTILINE)
TESTS = "t/integration/test_sqs.py"
#: Cases that are not run, and why.
DESELECTED = {
    "test_ack_invalid_receipt_with_backoff": "a second DeleteMessage must fail with 404; SQS documents success",
    "test_SQSBaseExchangeTypes::test_fanout": "needs SNS",
}


async def test_the_integration_tests_of_kombu_pass(
    new_endpoint: Callable[..., Worker], prefix: str, tmp_path: Path
) -> None:
    worker = await new_endpoint(prefix=prefix).start().ready()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTEST_", "PYTHON"))}
    environment = {
        **kept,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "SQS_HOST": "127.0.0.1",
        "SQS_PORT": worker.environment["MARQ_SQS_PORT"],
    }
    deselected = [option for name in DESELECTED for option in ("--deselect", f"{TESTS}::{name}")]

    def run(*tests: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environments.python("celery"), "-m", "pytest", *tests, "-p", "no:cacheprovider", "-rA"],
            cwd=environments.kombu_tests(), env=environment, capture_output=True, text=True,
            timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip

    done = await asyncio.to_thread(run, TESTS, *deselected)
    assert re.search(r" passed.*, 3 deselected", done.stdout), done.stdout[-500:] + done.stderr
    assert len(OUTCOME.findall(done.stdout)) == 39
    for _ in range(RERUNS):
        failed = [name for outcome, name in OUTCOME.findall(done.stdout) if outcome != "PASSED"]
        # Most tests wait for only a second, so kombu marks them for reruns.
        if not failed or any(re.search(UNMARKED, name) for name in failed):
            break
        done = await asyncio.to_thread(run, *failed)

    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
