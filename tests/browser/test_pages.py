"""The pages in a real browser, with statistics that need no broker: reading, acting, and who can use them."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from marq_worker.web.dashboard.live_history import LiveHistory
from marq_worker.web.dashboard.sending import lines
from tests.browser.pretend import DEAD_LETTERED, HOSTILE, PAGES, QUEUES, PretendNamespace
from tests.browser.serving import Background, Site, serving
from tests.browser.windows import ELSEWHERE, LONG, PHONE, examine, violations, width
from tests.live_windows import write_windows

#: In the year 2100.
PAUSED_UNTIL_MS = 4_102_444_800_000
#: Of each row: the text of each cell, and from where to where it goes.
CELLS = """rows => rows.map(row => [...row.cells].filter(cell => cell.colSpan === 1).map(cell => {
  const box = cell.getBoundingClientRect();
  return [cell.innerText, box.left, box.right];
}))"""


@pytest.fixture
def site(background: Background) -> Iterator[Site]:
    with serving(background, PretendNamespace()) as found:
        yield found


@pytest.fixture
def empty_site(background: Background) -> Iterator[Site]:
    with serving(background, PretendNamespace(queues=())) as found:
        yield found


@pytest.mark.parametrize("address", [*PAGES.values(), "/message?id=marq.messages/1/3"], ids=[*PAGES, "dead message"])
def test_each_page_can_be_used_by_all(site: Site, page: Page, address: str) -> None:
    site.namespace.story = (*site.namespace.story, DEAD_LETTERED)

    answer = page.goto(site.url + address)

    assert answer is not None
    assert answer.status == 200
    expect(page.locator("h1")).to_be_visible()
    examine(page)


def test_axe_finds_what_nobody_could_read(site: Site, page: Page) -> None:
    page.goto(site.url + "/dead-letters")
    page.locator("h1").evaluate("heading => { heading.style.color = '#eee'; }")

    assert any("color-contrast" in violation for violation in violations(page))


class LongNames(PretendNamespace):
    """Names of the maximum length without a place to break the line."""

    consumer = "c" * 200
    error = "e" * 200


class LongErrors(PretendNamespace):
    error = "the ledger is closed, so no booking can be made before the end of the month; ask accounting. " * 2


def test_long_names_leave_room_for_the_numbers_on_a_phone(background: Background, new_page: Any) -> None:
    page = new_page(viewport=PHONE)
    # A page that outlives its server complains when it looks for news.
    with serving(background, LongNames([*QUEUES, LONG])) as site, closing(page):
        for address in (
            *("/", f"/queues/{LONG}", f"/queues/{LONG}/messages?state=in_flight"),
            *("/queues/invoices/messages?state=dead", "/dead-letters", "/workers", "/health"),
        ):
            page.goto(site.url + address)

            rows = page.locator("main .scroll tbody tr").evaluate_all(CELLS)

            assert rows, address
            assert width(page) <= PHONE["width"], address
            for text, left, right in itertools.chain.from_iterable(rows):
                assert right - left <= 0.5 * PHONE["width"] or " " in text, f"{text[:40]} takes {right - left:.0f} px"
            for cells in rows:
                # Of each row a name and what stands next to it can be read without scrolling.
                assert sum(right <= PHONE["width"] for _, _, right in cells) >= min(2, len(cells)), cells


def test_the_errors_of_dead_letters_are_in_view_on_a_phone(site: Site, new_page: Any) -> None:
    page = new_page(viewport=PHONE)
    for address in ("/dead-letters", PAGES["dead"]):
        page.goto(site.url + address)

        rows = page.locator("main .scroll tbody tr").evaluate_all(CELLS)

        assert rows
        for cells in rows:
            shown = [text for text, _, right in cells if right <= PHONE["width"]]
            assert any("ValueError: no customer" in text or "TimeoutError" in text for text in shown), shown


def test_numbers_of_queues_are_in_view_on_a_phone_and_names_stay_while_they_are_scrolled(
    background: Background, new_page: Any
) -> None:
    page = new_page(viewport=PHONE)
    with serving(background, PretendNamespace([*QUEUES, LONG])) as site, closing(page):
        page.goto(site.url + "/")
        table = page.get_by_role("region", name="Queues")

        before = table.locator("tbody tr").evaluate_all(CELLS)
        table.evaluate("region => { region.scrollLeft = region.scrollWidth; }")
        after = table.locator("tbody tr").evaluate_all(CELLS)

    assert len(before) == len(QUEUES) + 1
    for cells in before:
        # State, waiting and in flight.
        assert [right <= PHONE["width"] for _, _, right in cells[:4]] == [True] * 4, cells[:4]
    for cells in after:
        (_, left, right), (_, last_left, last_right) = cells[0], cells[-1]
        assert (left >= 0, right <= last_left, last_right <= PHONE["width"]) == (True, True, True)


def test_each_page_can_be_read_and_used_without_javascript(site: Site, new_page: Any) -> None:
    page = new_page(java_script_enabled=False)

    for name, address in PAGES.items():
        answer = page.goto(site.url + address)
        assert answer.status == 200, name
    page.goto(site.url + PAGES["delayed"])
    page.get_by_role("checkbox").first.check()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel", exact=True).click()

    expect(page.get_by_role("status")).to_have_text("1 cancelled")
    assert [action for action, _ in site.actor.asked] == ["cancel"]


def test_nothing_that_a_payload_says_is_run_and_what_is_secret_is_not_shown(site: Site, page: Page) -> None:
    page.goto(site.url + PAGES["message"])

    expect(page.locator(".payload code").first).to_contain_text("<img src=x onerror=alert(1)>")
    assert "4111" not in page.content()
    page.goto(site.url + PAGES["in flight"])
    expect(page.locator("tbody tr").first).to_contain_text("<script>alert(3)</script>")
    assert "4111" not in page.content()


# --- the table of queues ----------------------------------------------------------------------------------------------


def test_queues_are_sorted_and_filtered_by_the_address(site: Site, page: Page) -> None:
    names = page.locator(".queues tbody th")
    page.goto(site.url + "/")
    expect(names).to_have_text(sorted(QUEUES))

    page.get_by_role("link", name="In flight", exact=True).click()
    expect(page).to_have_url(re.compile("sort=in_flight&order=desc"))
    expect(names.first).to_have_text("webhooks")

    page.get_by_role("searchbox").fill("in")
    page.get_by_role("button", name="Filter", exact=True).click()
    expect(page).to_have_url(re.compile("q=in"))
    expect(names).to_have_text(["invoices"])


def test_waiting_messages_are_searched_and_sorted_by_the_address(site: Site, page: Page) -> None:
    page.goto(site.url + PAGES["waiting"])

    page.get_by_label("Payload contains").fill("ann")
    page.get_by_label("Header, or header=part of its value").fill("tenant=acme")
    page.get_by_role("button", name="Filter", exact=True).click()
    expect(page.get_by_text("3 of 3 waiting messages match")).to_be_visible()
    page.get_by_role("link", name="Bytes", exact=True).click()

    expect(page).to_have_url(re.compile("sort=bytes&order=desc"))
    expect(page.get_by_label("Payload contains")).to_have_value("ann")
    last = site.namespace.searches[-1]
    assert (last.text, last.header, last.sort, last.descending) == ("ann", "tenant=acme", "bytes", True)


def test_a_page_is_refreshed_while_somebody_looks(site: Site, page: Page) -> None:
    page.goto(site.url + "/")
    page.get_by_label("Refresh").select_option("2")

    site.namespace.queues.append("new")

    expect(page.locator(".queues tbody")).to_contain_text("new")
    expect(page).to_have_url(site.url + "/")


def test_a_message_that_is_selected_during_a_refresh_stays_selected(site: Site, page: Page) -> None:
    page.goto(site.url + PAGES["delayed"])
    page.get_by_label("Refresh").select_option("off")
    rows = page.locator("tbody tr")
    chosen = page.get_by_role("checkbox").first
    place = chosen.get_attribute("value")
    before = rows.count()
    waiting: list[Route] = []
    page.route("**/messages?state=delayed", lambda route: waiting.append(route))
    page.evaluate(
        "() => { window.refreshed = new Promise(done => document.addEventListener('htmx:finally:request', done)); }"
    )

    with page.expect_request("**/messages?state=delayed"):
        page.keyboard.press("r")
    chosen.check()
    del site.namespace.delayed[str(place)]
    waiting[0].continue_()
    page.evaluate("() => window.refreshed.then(() => true)")

    expect(rows).to_have_count(before)
    assert page.locator("input:checked").get_attribute("value") == place
    page.unroute_all()
    chosen.uncheck()
    # Keys that are pressed in a field do nothing.
    page.locator("h1").click()
    page.keyboard.press("r")
    expect(rows).to_have_count(before - 1)


def test_the_rows_of_messages_keep_their_identity_when_a_page_is_refreshed(site: Site, page: Page) -> None:
    page.goto(site.url + PAGES["delayed"])
    rows = page.locator("tbody tr")
    before = rows.count()
    second = page.get_by_role("checkbox").nth(1).get_attribute("value")
    rows.nth(1).evaluate("row => { row.seen = 'second'; }")

    del site.namespace.delayed[next(iter(site.namespace.delayed))]
    page.keyboard.press("r")

    expect(rows).to_have_count(before - 1)
    assert rows.first.evaluate("row => row.seen") == "second"
    expect(page.get_by_role("button", name="Select all", exact=True)).to_be_visible()
    assert page.get_by_role("checkbox").first.get_attribute("value") == second


def test_pages_of_a_queue_with_a_slash_in_its_name_refresh_themselves_and_have_their_json(
    site: Site, page: Page
) -> None:
    page.goto(site.url + "/queues/a%2Fb%26c/messages?state=in_flight&error=mail+server")
    page.get_by_label("Refresh").select_option("2")

    site.namespace.open.popitem()

    expect(page.locator("tbody tr")).to_have_count(3)
    told = page.get_by_role("link", name="This page as JSON").get_attribute("href")
    assert told is not None
    assert page.request.get(site.url + told).json()["queue"] == "a/b&c"


def test_charts_are_drawn_with_the_last_values_in_their_legend_and_said_in_a_table(site: Site, page: Page) -> None:
    page.goto(site.url + "/")

    expect(page.locator(".chart[data-drawn=yes] canvas")).to_have_count(2)
    legend = page.locator(".legend").first.get_by_role("listitem")
    expect(legend).to_have_text([re.compile(rf"{label}\s+\d+") for label in ("waiting", "in flight", "delayed")])
    page.get_by_text("Show as a table").click()
    expect(page.locator(".past tbody tr").first).to_be_visible()


def test_the_legend_shows_the_values_at_the_cursor_and_what_is_not_known_of_a_sum(site: Site, page: Page) -> None:
    series = {"waiting": [7, 8], "in_flight": [1.25, None], "waiting_for_delivery": [20, 30]}
    series["waiting_for_redelivery"] = [4, None]
    page.route("**/api/history", lambda route: route.fulfill(json={"times": [0, 600], "series": series}))
    page.goto(site.url + "/")
    values = page.locator(".legend").first.locator("b")
    # The last ones that are known.
    expect(values).to_have_text(["8", "1.3", "24"])

    page.locator(".chart .u-over").first.hover(position={"x": 1, "y": 50})
    expect(values).to_have_text(["7", "1.3", "24"])
    page.locator(".chart .u-over").first.hover(position={"x": 300, "y": 50})
    expect(values).to_have_text(["8", "\N{EN DASH}", "\N{EN DASH}"])


def test_a_chart_shows_a_value_between_two_gaps(site: Site, page: Page) -> None:
    waiting = [None] * 300 + [8] + [None] * 300
    answer = {"times": [*range(len(waiting))], "series": {"waiting": waiting}}
    page.route("**/api/history", lambda route: route.fulfill(json=answer))

    page.goto(site.url + "/")

    expect(page.locator(".chart[data-drawn=yes] canvas")).to_have_count(2)
    # Axes and grid are grey.
    coloured = page.locator(".chart canvas").first.evaluate("""canvas => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) {
            const rgb = data.slice(at, at + 3);
            count += data[at + 3] > 128 && Math.max(...rgb) - Math.min(...rgb) > 64;
        }
        return count;
    }""")
    assert coloured > 4 * 4


def test_charts_stay_when_a_page_is_refreshed(site: Site, page: Page) -> None:
    page.goto(site.url + "/")
    expect(page.locator(".chart[data-drawn=yes] canvas")).to_have_count(2)
    page.locator(".chart").first.evaluate("chart => { chart.dataset.kept = 'yes'; }")

    site.namespace.queues.append("new")
    page.keyboard.press("r")

    expect(page.locator(".queues tbody")).to_contain_text("new")
    expect(page.locator(".chart[data-kept=yes] canvas")).to_have_count(1)


def test_longer_charts_show_the_windows_of_the_pipeline_and_say_how_old_they_are(
    site: Site, page: Page, tmp_path: Path
) -> None:
    now_s = int(time.time())
    end_s = now_s // 60 * 60 - 600
    minutes = range(end_s - 3_600, end_s, 60)
    row = {"sent": 60, "delivered": 60, "acked": 60, "wait_p50_ms": 3, "wait_p95_ms": 20, "wait_p99_ms": 50}
    write_windows(tmp_path, {("", at_s): row for at_s in minutes}, computed_s=end_s)
    site.namespace.live = LiveHistory(tmp_path, "marq")
    page.set_viewport_size(PHONE)
    page.goto(site.url + "/")

    page.get_by_label("Range of the charts").get_by_role("link", name="24h").click()

    expect(page.get_by_role("heading", name="Last 24 hours")).to_be_visible()
    expect(page.locator(".chart[data-drawn=yes] canvas")).to_have_count(3)
    expect(page.locator(".legend").first.locator("b").first).to_have_text("1/s")
    # 10 m, or more: the minute began up to a minute before the test.
    expect(page.get_by_role("alert").filter(has_text=re.compile(r"windows are 1\d m"))).to_be_visible()
    assert width(page) <= PHONE["width"]
    assert violations(page) == []

    write_windows(tmp_path, {}, computed_s=now_s + 3_600, begin_s=minutes[0])
    page.keyboard.press("r")
    expect(page.get_by_role("alert").filter(has_text="windows are")).to_have_count(0)


def test_no_column_of_queues_is_out_of_view_on_a_desktop(background: Background, new_page: Any) -> None:
    page = new_page(viewport={"width": 1180, "height": 780})
    with serving(background, PretendNamespace([*QUEUES, LONG])) as site, closing(page):
        site.namespace.paused[LONG] = PAUSED_UNTIL_MS
        page.goto(site.url + "/")

        rows = page.locator(".queues tbody tr").evaluate_all(CELLS)

    assert len(rows) == len(QUEUES) + 1
    for cells in rows:
        assert cells[-1][2] <= 1180, cells


def test_the_end_of_a_pause_covers_no_number_on_a_phone(site: Site, new_page: Any) -> None:
    page = new_page(viewport=PHONE)
    site.namespace.paused[QUEUES[0]] = PAUSED_UNTIL_MS
    page.goto(site.url + "/")

    end = page.locator(".queues tbody small").bounding_box()
    number = page.locator(".queues tbody tr").filter(has=page.locator("small")).locator("td").nth(1).bounding_box()

    assert end is not None
    assert number is not None
    assert end["x"] + end["width"] <= number["x"]


def test_the_error_of_a_blocked_key_is_wide_and_not_high_on_a_phone(background: Background, new_page: Any) -> None:
    page = new_page(viewport=PHONE)
    with serving(background, LongErrors()) as site, closing(page):
        page.goto(site.url + "/queues/invoices")
        row = page.get_by_role("region", name="Blocked keys").locator("tbody tr").first.bounding_box()

    assert row is not None
    assert row["height"] < 0.25 * PHONE["height"]


def test_earlier_runs_of_a_schedule_stay_unfolded_when_the_page_is_refreshed(site: Site, page: Page) -> None:
    page.goto(site.url + "/schedules")
    earlier = page.locator("details a")
    expect(earlier.first).to_be_hidden()
    page.get_by_text("9 before").click()

    site.namespace.resumed.add("hourly")
    page.keyboard.press("r")

    expect(page.get_by_text("paused", exact=True)).to_have_count(0)
    expect(earlier.first).to_be_visible()


def test_the_last_run_of_a_schedule_covers_no_other_cell_on_a_phone(site: Site, new_page: Any) -> None:
    page = new_page(viewport=PHONE)
    page.goto(site.url + "/schedules")

    last, following = (page.locator("tbody tr").first.locator("td > a > time, td > time").nth(i) for i in (0, 1))
    run, after = last.bounding_box(), following.bounding_box()

    assert run is not None
    assert after is not None
    assert run["x"] + run["width"] <= after["x"]


def test_protocol_details_of_a_message_are_folded_away(site: Site, page: Page) -> None:
    page.goto(site.url + PAGES["message"])

    expect(page.locator(".timeline")).to_contain_text("Delivered to worker-2, attempt 2")
    expect(page.get_by_text("00c0ffee00c0ffee").first).to_be_hidden()
    page.get_by_text("Protocol details").click()
    expect(page.get_by_text("00c0ffee00c0ffee").first).to_be_visible()


def test_the_keyboard_filters_and_changes_the_theme_which_stays(site: Site, page: Page) -> None:
    page.goto(site.url + "/")

    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_a_namespace_without_queues_says_what_to_do_next(empty_site: Site, page: Page) -> None:
    for address, said in (
        ("/", "producer.send("),
        ("/dead-letters", "marq dead"),
        ("/schedules", "[schedules.report]"),
    ):
        page.goto(empty_site.url + address)

        expect(page.locator(".empty")).to_contain_text(said)
        assert violations(page) == []


# --- actions ----------------------------------------------------------------------------------------------------------


def test_messages_that_are_selected_are_acted_on_once_confirmed(site: Site, page: Page) -> None:
    page.goto(site.url + PAGES["delayed"])
    before = page.locator("tbody tr").count()
    for answer in ("Do nothing", "Deliver now"):
        page.get_by_role("button", name="Select all", exact=True).click()
        page.get_by_role("button", name="Deliver now", exact=True).click()
        expect(page.locator(".question")).to_contain_text(f"{before} messages")
        page.get_by_role("button", name=answer, exact=True).hover()
        assert violations(page) == []
        assert site.actor.asked == []

        page.get_by_role("button", name=answer, exact=True).click()
        expect(page).to_have_url(re.compile(re.escape(site.url + PAGES["delayed"])))

    expect(page.get_by_role("status")).to_contain_text(f"{before} ")
    expect(page.locator(".empty")).to_be_visible()
    [(asked, (queue, ids))] = site.actor.asked
    assert (asked, queue, len(ids)) == ("deliver-now", "emails", before)


def test_buttons_name_their_page_over_plain_http_on_an_address_of_another_machine(site: Site, browser: Browser) -> None:
    # Not from new_page: the console says that Cross-Origin-Opener-Policy is for trustworthy addresses only.
    page = browser.new_page()
    url = site.url.replace("127.0.0.1", ELSEWHERE)
    page.goto(url + "/queues/webhooks")

    with page.expect_request(lambda request: request.method == "POST") as sent:
        page.get_by_role("button", name="Pause", exact=True).click()

    expect(page.locator(".question")).to_be_visible()
    headers = sent.value.all_headers()
    page.close()
    assert (headers.get("origin"), headers.get("sec-fetch-site")) == (url, None)


def test_all_messages_that_match_are_acted_on_with_progress(site: Site, page: Page) -> None:
    page.goto(site.url + "/queues/emails/messages?state=in_flight&error=mail+server")
    page.get_by_label("At least N deliveries").fill("2")
    page.get_by_role("button", name="Filter", exact=True).click()
    page.get_by_role("button", name="Release all that match", exact=True).click()
    expect(page.locator(".question")).to_contain_text("all 4 messages of queue emails that match")
    assert site.actor.asked == []

    page.get_by_role("button", name="Release", exact=True).click()

    expect(page.locator("h1")).to_contain_text("done")
    expect(page.get_by_text("4 of 4 requested to be released")).to_be_visible()
    [(asked, (queue, ids))] = site.actor.asked
    assert (asked, queue, len(ids)) == ("release", "emails", 4)


def test_a_dead_letter_is_edited_and_sent_as_it_was_typed(site: Site, page: Page) -> None:
    site.namespace.story = (*site.namespace.story, DEAD_LETTERED)
    page.goto(site.url + "/message?id=marq.messages/1/3&queue=invoices")
    page.get_by_role("button", name="Edit and resend", exact=True).click()
    payload = page.get_by_label("Payload")
    expect(payload).to_have_value(HOSTILE.decode())
    examine(page)

    payload.fill("\n two lines\n")
    page.get_by_role("button", name="Edit and resend", exact=True).click()

    expect(page.get_by_role("status")).to_have_text("1 sent")
    [(_, (queue, identity, form))] = site.actor.asked
    assert (queue, identity, lines(form["value"])) == ("invoices", "marq.messages/1/3", "\n two lines\n")


def test_a_test_message_is_sent_from_the_page_of_a_queue(site: Site, page: Page) -> None:
    page.goto(site.url + "/queues/emails")
    page.get_by_role("button", name="Send a message", exact=True).click()
    page.get_by_label("Payload, as text").fill("hello")
    page.get_by_label("Headers").fill("tenant: acme")
    examine(page)
    page.get_by_role("button", name="Send a message", exact=True).click()

    expect(page).to_have_url(re.compile("/message"))
    [(_, (queue, form))] = site.actor.asked
    assert (queue, form["value"], form["headers"]) == ("emails", "hello", "tenant: acme")


def test_a_worker_is_made_quiet_and_takes_messages_again(site: Site, page: Page) -> None:
    page.goto(site.url + "/workers")
    for button, state, warnings in (("Quiet", "quiet", 2), ("Resume", "running", 0)):
        page.get_by_role("button", name=button, exact=True).click()
        expect(page.locator(".question")).to_contain_text("10.0.0.7")
        assert violations(page) == []
        page.get_by_role("button", name=button, exact=True).click()

        expect(page.get_by_role("region", name="Handlers").locator(".state")).to_have_text(state)
        # The worker's, and that of its handlers.
        expect(page.locator(".state.wrong").filter(has_text="quiet")).to_have_count(warnings)

    assert [action for action, _ in site.actor.asked] == ["quiet", "unquiet"]


def test_a_redrive_to_a_mistyped_queue_is_asked_about_once_more(site: Site, page: Page) -> None:
    page.goto(site.url + "/dead-letters")
    page.get_by_role("row", name="ValueError").get_by_role("button", name="Redrive", exact=True).click()
    page.get_by_label("To another queue").fill("invoises")
    page.get_by_role("button", name="Redrive", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Did you mean 'invoices'?")
    assert violations(page) == []

    page.get_by_label("Send them to the unknown queue").check()
    page.get_by_role("button", name="Redrive", exact=True).click()

    expect(page.locator("h1")).to_contain_text("done")
    [(_, selection)] = site.actor.asked
    assert selection.to == "invoises"
