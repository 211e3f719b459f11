"""The Celery example and the programs of docs/sqs.md do what they say, on an endpoint of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lab.program import Program
from marq.wire.names import Names
from marq_worker.broker.downloads import JarList
from marq_worker.broker.ports import free_port
from marq_worker.sqs.access_keys import load_keys
from marq_worker.sqs.aws_json import operations
from marq_worker.sqs.operations import SUPPORTED
from tests.docs.pages import ROOT, blocks
from tests.sqs import environments
from tests.worker.harness import Worker, eventually

PAGE = ROOT / "docs" / "sqs.md"
LIMIT_SECONDS = 120


def block(language: str, beginning: str) -> str:
    [code] = [example.code for example in blocks(language) if example.page == PAGE and beginning in example.code]
    return code


@pytest.fixture
async def endpoint(servers: str, names: Names, tmp_path: Path) -> AsyncIterator[Worker]:
    environment = {"MARQ_ROLES": "tracker,handlers,web,sqs", "MARQ_SQS_PORT": str(free_port("127.0.0.1"))}
    with Worker(servers, tmp_path, prefix=names.prefix, environment=environment) as worker:
        yield await worker.ready()


class Shell:
    """Runs programs of a page in a directory, with the port of the test's endpoint."""

    def __init__(self, directory: Path, endpoint: Worker) -> None:
        self.directory = directory
        self.port = endpoint.environment["MARQ_SQS_PORT"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MARQ_"))}
        broker = f"sqs://any:any@127.0.0.1:{self.port}"
        self.environment = {**kept, "PYTHONPATH": f"{directory}:{ROOT}", "CELERY_BROKER_URL": broker}

    def write(self, name: str, code: str) -> None:
        (self.directory / name).write_text(code.replace("9324", self.port), encoding="utf-8")

    async def run(self, *command: str | Path) -> str:
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=self.directory, env=self.environment, capture_output=True, text=True,
            timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path, endpoint: Worker) -> Iterator[Shell]:
    return Shell(tmp_path, endpoint)


def test_the_keys_file_of_the_page_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "orders.secret").write_text("0123456789abcdef\n")
    file = tmp_path / "keys.toml"
    file.write_text(block("text", "# keys.toml"), encoding="utf-8")

    keys = load_keys(file)

    assert set(keys) == {"ORDERS", "CELERY"}
    assert keys["ORDERS"].allows("send", "orders-new")
    assert not keys["ORDERS"].allows("manage", "orders-new")


def test_the_page_lists_each_operation_and_whether_it_is_supported() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Operations")[2].partition("\n\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    listed = {name.strip(" `"): answer.strip() for names, answer in rows for name in names.split(",")}

    assert set(listed) == operations()
    assert {name for name, answer in listed.items() if answer.startswith("yes")} == SUPPORTED


def jar_version(jars: str, name: str) -> str:
    """Return the version of an artifact in a list of jars."""
    paths = JarList.read(environments.HERE / "java" / f"{jars}.sha256").sums
    [version] = [path.split("/")[-2] for path in paths if path.split("/")[-3] == name]
    return version


def test_the_page_lists_the_versions_that_are_tested() -> None:
    def text(name: str) -> str:
        return (environments.HERE / name).read_text(encoding="utf-8")

    locks = text("tasks.lock") + text("celery.lock") + text("judges.lock")
    python = dict(re.findall(r"^(\S+)==(\S+)", locks, re.MULTILINE))
    node = json.loads(text("node/package.json"))["dependencies"]
    go = dict(re.findall(r"(\S+) v(\S+)", text("go/go.mod")))

    table = PAGE.read_text(encoding="utf-8").partition("| client | version |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert dict(rows) == {
        "boto3": python["boto3"],
        "Celery": python["celery"],
        "kombu": python["kombu"],
        "`aws` command": python["awscli"],
        "dramatiq-sqs": python["dramatiq-sqs"],
        "taskiq-aio-sqs": python["taskiq-aio-sqs"],
        "django-q2": python["django-q2"],
        "`@aws-sdk/client-sqs` (JavaScript)": node["@aws-sdk/client-sqs"],
        "`sqs-consumer` (JavaScript)": node["sqs-consumer"],
        "`aws-sdk-go-v2/service/sqs` (Go)": go["github.com/aws/aws-sdk-go-v2/service/sqs"],
        "`gocloud.dev/pubsub/awssnssqs` (Go)": go["gocloud.dev"],
        "Spring Cloud AWS (Java)": ", ".join(jar_version(f"spring{n}", "spring-cloud-aws-sqs") for n in (3, 4)),
        "Amazon SQS Java Messaging Library": jar_version("clients", "amazon-sqs-java-messaging-lib"),
        "`SqsAsyncBatchManager` (AWS SDK for Java)": jar_version("clients", "sqs"),
        "`aws2-sqs` (Apache Camel)": jar_version("clients", "camel-aws2-sqs"),
    }


@pytest.mark.verify
async def test_boto3(shell: Shell) -> None:
    shell.write("program.py", block("python", "receive_message"))

    assert await shell.run(sys.executable, "program.py") == 'received {"to": "ann@example.org"}\n'


@pytest.mark.verify
@pytest.mark.parametrize("application", ["celery_tasks", "examples.celery_tasks"])
async def test_celery(shell: Shell, application: str, tmp_path: Path) -> None:
    python = await asyncio.to_thread(environments.python, "celery")
    shell.write("celery_tasks.py", block("python", "# celery_tasks.py"))
    send = block("sh", "celery -A").splitlines()[1].removeprefix("python -c ").strip("'")
    worker = Program(
        "celery", [str(python), "-m", "celery", "-A", application, "worker", "-c", "2"], shell.environment,
        tmp_path / "celery.log", directory=tmp_path,
    )  # fmt: skip

    with worker:
        if application == "celery_tasks":
            await shell.run(python, "-c", send)
        else:
            assert await shell.run(python, "-m", application, "3") == "sent 3\n"
        expected = ["ann"] if application == "celery_tasks" else ["user-0", "user-1", "user-2"]

        async def log() -> str:
            worker.check()
            return worker.log()

        await eventually(log, lambda text: all(f"sent to {name}@example.org" in text for name in expected))
    assert worker.exit_code == 0
