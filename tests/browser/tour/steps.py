"""The steps of the tour: each page looked at, each action done, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from playwright.sync_api import Locator, Page, expect

from marq.version import VERSION
from tests.browser.tour.stage import DEAD, DEAD_COUNT, DELAYED, DELAYED_COUNT, HELD, WAITING, WAITING_COUNT, Stage
from tests.browser.windows import examine

#: How long a task may take, on a machine that is busy: a purge waits for several answers.
TASK_MS = 60_000

Check = Callable[[Stage, Page], None]


class Step(NamedTuple):
    """One of them; ``check`` fails with what is wrong."""

    name: str
    check: Check


def path(queue: str) -> str:
    return f"/queues/{quote(queue, safe='')}"


def messages(queue: str, state: str) -> str:
    return f"{path(queue)}/messages?state={state}"


def row(page: Page, *said: str) -> Locator:
    """Return the row of a table that contains all of these texts."""
    found = page.locator("tbody tr")
    for text in said:
        found = found.filter(has_text=text)
    return found


def shown(page: Page, address: str, rows: int) -> None:
    """Wait until a page shows a table with this number of rows."""
    page.goto(address)
    page.get_by_label("Refresh").select_option("2")
    expect(page.locator("tbody tr")).to_have_count(rows)


def confirm(page: Page, button: Locator) -> None:
    """Press a button, look at the page that asks about it, and press it there."""
    label = button.inner_text()
    button.click()
    expect(page.locator(".question")).to_be_visible()
    page.get_by_role("button", name=label, exact=True).hover()
    examine(page)
    page.get_by_role("button", name=label, exact=True).click()


def ended(page: Page, done: str) -> None:
    """Wait for the end of a task."""
    expect(page.locator("h1")).to_contain_text("done", timeout=TASK_MS)
    expect(page.get_by_text(done)).to_be_visible()
    examine(page)


# --- pages ------------------------------------------------------------------------------------------------------------


def visit(name: str, address: str, check: Check) -> Step:
    """Check a page: its contents, its accessibility, and its JSON."""

    def look(stage: Stage, page: Page) -> None:
        answer = page.goto(stage.url + address)
        assert answer is not None
        assert answer.status == 200, answer.status
        check(stage, page)
        examine(page)
        told = page.request.get(stage.url + _json_address(page))
        assert told.status == 200, told.status
        assert isinstance(told.json(), dict)

    return Step(f"page   {name}", look)


def _json_address(page: Page) -> str:
    found = page.get_by_role("link", name="This page as JSON").get_attribute("href")
    assert found is not None
    return found


def _overview(stage: Stage, page: Page) -> None:
    # A slow machine may have left one queue without a consumer for long enough.
    expect(page.locator(".alarm").filter(has_not_text=WAITING)).to_have_count(0)
    expect(page.locator(".chart[data-drawn=yes] canvas")).to_have_count(2)
    for queue in (*stage.plan.queue_names[:2], DEAD, DELAYED, HELD):
        expect(row(page, queue)).to_have_count(1)
    expect(row(page, HELD)).to_contain_text("busy")
    # What is not known in time is shown the next time.
    page.get_by_label("Refresh").select_option("2")
    expect(row(page, HELD).get_by_role("cell").last).to_have_text("1")
    page.get_by_label("Refresh").select_option("0")


def _filtered(stage: Stage, page: Page) -> None:
    expect(page.locator(".queues tbody tr")).to_have_count(1)


def _queue(stage: Stage, page: Page) -> None:
    expect(page.get_by_role("region", name="Consumers").locator("tbody tr")).to_have_count(1)
    assert page.get_by_role("region", name="Partitions").locator("tbody tr").count() > 0
    expect(page.get_by_role("region", name="Trackers").locator("tbody tr").first).to_contain_text("owner")


def _without_consumer(stage: Stage, page: Page) -> None:
    expect(page.locator(".empty")).to_contain_text("This queue has no consumer")


def _in_flight(stage: Stage, page: Page) -> None:
    held = stage.hold()
    page.get_by_label("Refresh").select_option("2")
    expect(row(page, held.id)).to_contain_text("<img src=x")
    page.get_by_label("Refresh").select_option("0")
    assert "4111" not in page.content()


def _delayed(stage: Stage, page: Page) -> None:
    expect(page.locator("tbody tr")).to_have_count(DELAYED_COUNT)


def _waiting(stage: Stage, page: Page) -> None:
    expect(page.locator("tbody tr")).to_have_count(WAITING_COUNT)
    expect(page.locator("tbody tr").first).to_contain_text("while nobody listens")


def _dead(stage: Stage, page: Page) -> None:
    expect(page.locator("tbody tr")).to_have_count(DEAD_COUNT)


def _message(stage: Stage, page: Page) -> None:
    held = stage.hold()
    page.get_by_role("searchbox", name="Id").fill(held.id)
    page.get_by_role("button", name="Filter", exact=True).click()
    page.get_by_label("Refresh").select_option("2")
    page.get_by_role("link", name=held.id, exact=True).click()
    expect(page.locator(".timeline strong")).to_have_text(
        [f"Sent to {HELD}", re.compile("^Delivered to .+, attempt 1$"), re.compile("^In the handler of ")]
    )
    page.get_by_text("Protocol details").click()
    expect(row(page, "ACQUIRE")).to_be_visible()
    expect(page.locator(".payload code").first).to_contain_text("<img src=x")
    assert "4111" not in page.content()


def _kinds(stage: Stage, page: Page) -> None:
    for queue in stage.plan.queue_names[:2]:
        expect(row(page, queue, "fails at attempt N")).to_have_count(1)
    expect(row(page, DEAD, "no customer N")).to_contain_text("last:")


def _workers(stage: Stage, page: Page) -> None:
    workers = page.get_by_role("region", name="Workers").locator("tbody tr")
    for url in (stage.url, stage.other_url):
        expect(workers.filter(has_text=url)).to_contain_text(
            re.compile(rf"{re.escape(VERSION)}.* (s|min)[\s\S]*%[\s\S]*MiB")
        )
    expect(row(page, f".queue.{HELD}").get_by_role("cell").first).not_to_be_empty()


def _health(stage: Stage, page: Page) -> None:
    # By text, so that a failure names the link.
    wrong = page.get_by_role("row").filter(has=page.locator(".state.wrong"))
    expect(wrong.filter(has_not_text=f"{WAITING}: has no consumer")).to_have_text([])


def _schedules(stage: Stage, page: Page) -> None:
    expect(row(page, "nightly")).to_contain_text("0 2 * * *")


PAGES = (
    visit("queues", "/", _overview),
    visit("queues, filtered and sorted", f"/?q={quote(HELD)}&sort=in_flight&order=desc", _filtered),
    visit("queue", path(HELD), _queue),
    visit("queue that nobody consumes", path(WAITING), _without_consumer),
    visit("messages in flight", messages(HELD, "in_flight"), _in_flight),
    visit("messages delayed", messages(DELAYED, "delayed"), _delayed),
    visit("messages waiting", messages(WAITING, "waiting"), _waiting),
    visit("dead letters of a queue", messages(DEAD, "dead"), _dead),
    visit("message", messages(HELD, "in_flight"), _message),
    visit("dead letters", "/dead-letters", _kinds),
    visit("schedules", "/schedules", _schedules),
    visit("workers", "/workers", _workers),
    visit("health", "/health", _health),
)


# --- actions ----------------------------------------------------------------------------------------------------------


def _release(stage: Stage, page: Page) -> None:
    held = stage.hold()
    shown(page, f"{stage.url}{messages(HELD, 'in_flight')}&id={held.id}", 1)
    page.get_by_role("checkbox").check()
    confirm(page, page.get_by_role("button", name="Release", exact=True))
    expect(page.get_by_role("status")).to_have_text("1 requested to be released")
    again = stage.again(HELD, held.id)
    assert again.attempt == held.attempt
    page.goto(f"{stage.url}/message?id={held.id}")
    expect(page.locator(".timeline strong")).to_have_text(
        [
            f"Sent to {HELD}",
            re.compile("^Delivered to .+, attempt 1$"),
            re.compile("^In the handler of "),
            re.compile("^Released by an operator, to be redelivered at once"),
            "Redelivered for attempt 1, because it was released",
            re.compile("^Delivered to .+, attempt 1$"),
            re.compile("^In the handler of "),
        ]
    )
    assert '"audit": "release"' in stage.log()
    stage.run(again.ack())


def _cancel(stage: Stage, page: Page) -> None:
    shown(page, stage.url + messages(DELAYED, "delayed"), DELAYED_COUNT)
    box = page.get_by_role("checkbox").first
    place = box.get_attribute("value")
    box.check()
    confirm(page, page.get_by_role("button", name="Cancel", exact=True))
    expect(page.get_by_role("status")).to_have_text("1 cancelled")
    shown(page, stage.other_url + messages(DELAYED, "delayed"), DELAYED_COUNT - 1)
    page.goto(f"{stage.url}/message?id={place}")
    expect(page.locator(".timeline strong")).to_have_text(
        [
            re.compile("^Delayed by its sender, due in "),
            "Cancellation requested",
            "Finished without a delivery, because it was cancelled",
        ]
    )


def _deliver_now(stage: Stage, page: Page) -> None:
    page.goto(stage.url + messages(DELAYED, "delayed"))
    page.get_by_role("checkbox").last.check()
    confirm(page, page.get_by_role("button", name="Deliver now", exact=True))
    expect(page.get_by_role("status")).to_have_text("1 due now")
    [message] = stage.receive(DELAYED, 1)
    assert message.value == b"reminder %d" % (DELAYED_COUNT - 1)
    stage.run(message.ack())


def _redrive_kind(stage: Stage, page: Page) -> None:
    queue = stage.plan.queue_names[0]
    page.goto(f"{stage.url}/dead-letters?queue={queue}")
    confirm(page, row(page, queue, "fails at attempt N").get_by_role("button", name="Redrive", exact=True))
    expect(page.locator("h1")).to_contain_text("done", timeout=TASK_MS)
    dead = int(page.locator("progress").get_attribute("max") or 0)
    for message in stage.receive(queue, dead):
        assert message.attempt == 1
        stage.run(message.ack())
    page.goto(f"{stage.url}/dead-letters?queue={queue}")
    expect(page.locator(".empty")).to_be_visible()


def _redrive_selected(stage: Stage, page: Page) -> None:
    shown(page, stage.url + messages(DEAD, "dead"), DEAD_COUNT)
    page.get_by_role("checkbox").nth(0).check()
    page.get_by_role("checkbox").nth(1).check()
    page.get_by_role("button", name="Redrive", exact=True).click()
    page.get_by_label("To another queue").fill(DELAYED)
    page.get_by_role("button", name="Redrive", exact=True).click()
    ended(page, "2 of 2")
    for message in stage.receive(DELAYED, 2):
        assert message.value.startswith(b"order")
        stage.run(message.ack())


def _stop(stage: Stage, page: Page) -> None:
    """Also: another worker shows it, and says where it can be stopped."""
    page.goto(f"{stage.url}/dead-letters?queue={DEAD}")
    row(page, DEAD).get_by_role("button", name="Redrive", exact=True).click()
    page.get_by_label("Messages per second").fill("0.1")
    page.get_by_role("button", name="Redrive", exact=True).click()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    here = page.url
    page.goto(stage.other_url + urlsplit(here).path)
    expect(page.locator("h1")).to_contain_text("running")
    expect(page.get_by_role("link", name=here)).to_be_visible()
    examine(page)
    page.goto(here)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("h1")).to_contain_text("stopped")
    examine(page)


def _delete(stage: Stage, page: Page) -> None:
    queue = stage.plan.queue_names[1]
    page.goto(f"{stage.url}/dead-letters?queue={queue}")
    confirm(page, row(page, queue, "fails at attempt N").get_by_role("button", name="Delete", exact=True))
    expect(page.locator("h1")).to_contain_text("done", timeout=TASK_MS)
    page.goto(f"{stage.other_url}/dead-letters?queue={queue}")
    expect(page.locator(".empty")).to_be_visible()


def _pause(stage: Stage, page: Page) -> None:
    page.goto(stage.url + path(WAITING))
    confirm(page, page.get_by_role("button", name="Pause", exact=True))
    expect(page.locator("h1 .state")).to_have_text("paused")
    page.goto(stage.other_url + path(WAITING))
    page.get_by_label("Refresh").select_option("2")
    expect(page.locator("h1 .state")).to_have_text("paused")


def _resume(stage: Stage, page: Page) -> None:
    page.goto(stage.url + path(WAITING))
    confirm(page, page.get_by_role("button", name="Resume", exact=True))
    # It has no consumer.
    expect(page.locator("h1 .state")).to_have_text(re.compile("^(waiting|no consumer)$"))


def _purge(stage: Stage, page: Page) -> None:
    page.goto(stage.url + path(WAITING))
    page.get_by_role("button", name="Purge", exact=True).click()
    page.get_by_label("Type the name of the queue").fill(WAITING)
    examine(page)
    page.get_by_role("button", name="Purge", exact=True).click()
    ended(page, f"{WAITING_COUNT} of {WAITING_COUNT} purged")
    page.goto(stage.url + messages(WAITING, "waiting"))
    expect(page.locator(".empty")).to_be_visible()


ACTIONS = (
    Step("action release", _release),
    Step("action cancel", _cancel),
    Step("action deliver now", _deliver_now),
    Step("action redrive of a kind", _redrive_kind),
    Step("action redrive of those selected, to another queue", _redrive_selected),
    Step("action stop of a redrive", _stop),
    Step("action delete", _delete),
    Step("action pause", _pause),
    Step("action resume", _resume),
    Step("action purge", _purge),
)

STEPS = (*PAGES, *ACTIONS)
