"""Windows of a real browser in which nothing may go wrong unseen, and what is looked at in each page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.browser import chromium

#: How long a page may take to show what is waited for, on a machine that is busy.
WAIT_MS = 60_000
#: A name that leads here, but that browsers do not trust as they trust this machine's own addresses.
ELSEWHERE = "marq.test"
NARROW = {"width": 320, "height": 640}
#: A telephone; the longest name that a queue may have is longer than its screen is wide.
PHONE = {"width": 390, "height": 844}
LONG = "q" * 200


@contextmanager
def launched() -> Iterator[Browser]:
    """The machine's own Chromium; AssertionError says what to install where there is none."""
    path = chromium.find()
    assert path is not None, chromium.ADVICE
    with sync_playwright() as playwright:
        # No sandbox: it does not work for root, and the pages are ours.
        options = ["--no-sandbox", f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Makes pages; an error on any of them fails the block at its end."""
    contexts, complaints = [], []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def make(**options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    try:
        yield make
    finally:
        for context in contexts:
            context.close()
    assert complaints == []


def violations(page: Page) -> list[str]:
    """What axe finds, in words."""
    found = Axe().run(page).response["violations"]
    return [f"{violation['id']}: {node['html']}" for violation in found for node in violation["nodes"]]


def width(page: Page) -> int:
    """How wide a page is, in px, where its window may be narrower."""
    found: int = page.locator("html").evaluate("root => root.scrollWidth")
    return found


def examine(page: Page) -> None:
    """Check accessibility with axe in both themes, and the layout on a narrow screen."""
    for theme in ("light", "dark"):
        # Else colours would be on their way from one theme to the other.
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
        found = violations(page)
        assert not found, f"{theme} theme: {found}"
    page.emulate_media(color_scheme="null")
    size = page.viewport_size
    assert size is not None
    page.set_viewport_size(NARROW)  # type: ignore[arg-type]
    assert width(page) <= NARROW["width"], f"the page is {width(page)} px wide on a screen of {NARROW['width']} px"
    page.set_viewport_size(size)
