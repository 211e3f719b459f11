"""``python -m tests.browser.screenshots``: the pictures of the dashboard in README.md, of figures that are made up."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser import chromium
from tests.browser.pretend import PretendInstallation
from tests.browser.serving import Background, Site, serving

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = {"width": 1180, "height": 780}
#: Name, address, theme.
SHOTS = (
    ("queues", "/", "light"),
    ("message", "/message?id=marq.messages/0/1", "dark"),
    ("dead-letters", "/dead", "light"),
)


class Example(PretendInstallation):
    """What an installation might look like on a usual day."""

    payload = b'{"to": "ann@example.org", "card": "4111-1111", "lines": [{"item": "apples", "count": 7}]}'
    error = "ConnectionError: mail server refused"
    rare_kind = "TimeoutError: no answer within N s"
    story = (
        ("ACQUIRE", "taken by a consumer, attempt 1, lease 30 s"),
        ("RENEW", "kept for 30 s from here on"),
        ("RELEASE", "given back, to be delivered after its backoff: ConnectionError: mail server refused"),
        ("REDELIVERED", "sent to its queue again, attempt 2: it was released"),
        ("ACQUIRE", "taken by a consumer, attempt 2, lease 30 s"),
    )


def main() -> int:
    path = chromium.find()
    if path is None:
        print(f"error: {chromium.ADVICE}", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    background = Background()
    with serving(background, Example()) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, address, theme in SHOTS:
            shoot(browser, site, name, address, theme)
        browser.close()
    background.stop()
    return 0


def shoot(browser: Browser, site: Site, name: str, address: str, theme: str) -> None:
    """Take one picture."""
    page = browser.new_page(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.goto(site.url + address)
    for chart in page.locator(".chart").all():
        expect(chart).to_have_attribute("data-drawn", re.compile("yes"))
    page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
    page.close()
    print(f"    docs/images/{name}.png")


if __name__ == "__main__":
    sys.exit(main())
