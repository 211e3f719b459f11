"""A real browser, for tests of pages; none of them is an asynchronous one, for Playwright's loop is the thread's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.serving import Background
from tests.browser.windows import WAIT_MS, launched, watched

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: until it ends, Playwright's event loop keeps asynchronous tests from running."""
    with launched() as found:
        yield found


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Any]:
    """Makes pages; an error on any of them fails the test."""
    with watched(browser) as make:
        yield make


@pytest.fixture
def page(new_page: Any) -> Page:
    made: Page = new_page()
    return made
