"""``python -m tests.browser.screenshots``: the pictures of the dashboard in docs/, taken from a real run.

A worker on an embedded broker handles the messages of a small shop for a few minutes. Some fail, some are delayed.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from playwright.sync_api import Browser, expect, sync_playwright

import marq
from lab.program import Worker
from marq_worker.broker import EmbeddedBroker
from tests.browser import chromium

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = {"width": 1180, "height": 780}
#: How long the shop runs: the charts show the last 15 minutes.
MINUTES = 4.0
#: Messages per second of each queue.
RATES = {"orders": 40.0, "emails": 25.0, "invoices": 4.0}
CALL_ROUND_SECONDS = 0.25

_HANDLERS = '''"""Handlers of a small shop; some calls fail."""

import asyncio
import random

import marq


@marq.handler("orders")
async def place_order(message: marq.Message) -> None:
    await asyncio.sleep(random.uniform(0.005, 0.05))


@marq.handler("emails", codec=marq.JSON)
async def send_email(message: marq.Message) -> None:
    await asyncio.sleep(random.uniform(0.01, 0.2))
    if message.value["to"].startswith("unknown"):
        raise marq.Reject("address unknown")
    if random.random() < 0.05:
        raise ConnectionError("mail server refused the connection")


@marq.handler("invoices")
async def print_invoice(message: marq.Message) -> None:
    await asyncio.sleep(random.uniform(0.2, 0.9))
    if random.random() < 0.2:
        raise TimeoutError("printer did not answer within 1 s")
'''
_QUEUES = """
[queues.emails]
max_attempts = 3
backoff = [1, 5]

[queues.invoices]
concurrency = 2
max_attempts = 2
backoff = [2]
"""


def main() -> int:
    path = chromium.find()
    if path is None:
        print(f"error: {chromium.ADVICE}", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, EmbeddedBroker() as broker:
        (Path(folder) / "shop.py").write_text(_HANDLERS, encoding="utf-8")
        queues = Path(folder) / "queues.toml"
        queues.write_text(_QUEUES, encoding="utf-8")
        settings = {
            "MARQ_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "MARQ_HANDLERS": "shop",
            "MARQ_QUEUES_FILE": str(queues),
            "PYTHONPATH": folder,
        }
        with Worker("worker", Path(folder), settings) as worker:
            worker.wait_until_owned()
            asyncio.run(run_shop(broker.bootstrap_servers))
            addresses = {
                "queues": ("/", "light"),
                "message": (f"/message?id={quote(dead_message(worker), safe='')}", "dark"),
                "dead-letters": ("/dead-letters", "light"),
            }
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
                for name, (address, theme) in addresses.items():
                    shoot(browser, worker.url + address, name, theme)
                browser.close()
    return 0


async def run_shop(servers: str) -> None:
    """Send messages at changing rates for a few minutes."""
    until = time.monotonic() + MINUTES * 60
    async with marq.Producer(servers, codec=marq.JSON) as producer:
        while time.monotonic() < until:
            for queue, rate in RATES.items():
                count = int(random.expovariate(1 / (rate * CALL_ROUND_SECONDS)))
                await producer.send_many(queue, [_value(queue) for _ in range(count)])
            if random.random() < 0.1:
                await producer.send("emails", _value("emails"), delay=random.uniform(60, 900))
            await asyncio.sleep(CALL_ROUND_SECONDS)


def _value(queue: str) -> dict[str, object]:
    number = random.randrange(10_000)
    if queue == "emails":
        name = "unknown" if random.random() < 0.002 else "customer"
        return {"to": f"{name}-{number}@example.org", "template": "order-confirmed"}
    return {"order": number, "amount": random.randrange(5, 500)}


def dead_message(worker: Worker) -> str:
    """The id of a message that was retried and then dead-lettered."""
    status, text = worker.get("/api/queues/invoices/messages?state=dead")
    assert status == 200, text
    messages = json.loads(text)["messages"]
    assert messages, "no message was dead-lettered"
    return str(messages[0]["id"])


def shoot(browser: Browser, url: str, name: str, theme: str) -> None:
    """Take one picture."""
    page = browser.new_page(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    answer = page.goto(url)
    assert answer is not None
    assert answer.ok, page.content()
    for chart in page.locator(".chart").all():
        expect(chart).to_have_attribute("data-drawn", re.compile("yes"))
    page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
    page.close()
    print(f"    docs/images/{name}.png")


if __name__ == "__main__":
    sys.exit(main())
