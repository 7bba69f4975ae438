from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from layout_tuner.results_db.database.data_dir import DataDir
from tests.api.dashboard.browser import Visitor
from tests.api.dashboard.explored import INTRODUCED, LAYOUTS, Explored, explored_service
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore, completed, post_outcome, take_leases


def expect_live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")


def test_rows_and_figures_change_when_an_outcome_arrives(
    visitor: Visitor, explored: Explored
) -> None:
    campaign = explored.submit("watched")
    explored.measure(campaign, 3)
    page = visitor.open("/campaigns/watched")
    expect_live(page)
    loads: list[str] = []
    page.on("load", lambda _page: loads.append("load"))
    page.get_by_label("Compare trial 1", exact=True).check()
    page.get_by_label("Jump to trial").fill("77")
    expect(page.locator("#finding")).to_contain_text("The only measured layout runs at 2,800")
    explored.measure(campaign, 0)
    expect(page.locator("#rank-1")).to_contain_text("3,000")
    expect(page.locator("#rank-1")).to_have_class("changed")
    expect(page.locator("#rank-2")).not_to_have_class("changed")
    expect(page.locator("#finding")).to_contain_text("The best of 2 measured layouts")
    # What the reader has begun stays.
    expect(page.get_by_label("Compare trial 1", exact=True)).to_be_checked()
    expect(page.get_by_label("Jump to trial")).to_have_value("77")
    assert not loads
    explored.post("/campaigns/watched/cancel")


@pytest.mark.slow
def test_running_trials_reach_all_windows_and_leave_the_button_of_a_question(
    visitor: Visitor, explored: Explored
) -> None:
    campaign = explored.submit("in-two-windows")
    one = visitor.open("/campaigns/in-two-windows/trials")
    other = visitor.page.context.new_page()
    other.goto(f"{explored.url}/")
    expect_live(one)
    expect_live(other)
    trial = explored.run(campaign, LAYOUTS[0], None)
    expect(one.locator("#trials")).to_contain_text("RUNNING")
    row = other.locator("tr").filter(has_text="in-two-windows")
    expect(row).to_contain_text("1 running")
    one.locator("#trials").get_by_role("button", name="Cancel trial").click()
    one.get_by_role("dialog").get_by_role("button", name="Cancel trial").click()
    expect(one.get_by_text("The trial is cancelled.")).to_be_visible()
    other.close()
    # The stream outlives the window that opened it.
    explored.store.campaigns.cancel(campaign)
    expect(one.get_by_role("heading", level=1)).to_contain_text("CANCELLED")
    assert explored.store.trials.get(trial).campaign_id == campaign

    campaign = explored.submit("asked-about")
    page = visitor.open("/campaigns/asked-about")
    expect_live(page)
    page.get_by_role("button", name="Cancel campaign").click()
    dialog = page.get_by_role("dialog")
    explored.measure(campaign, 0)
    page.wait_for_timeout(1500)
    expect(page.locator("#rank-1")).to_have_count(0)
    dialog.get_by_role("button", name="Back").click()
    expect(page.locator("#rank-1")).to_be_visible()
    page.get_by_role("button", name="Cancel campaign").click()
    explored.measure(campaign, 1)
    page.wait_for_timeout(1500)
    dialog.get_by_role("button", name="Cancel campaign").click()
    expect(page.get_by_text("Workers stop its running trials.")).to_be_visible()


@pytest.mark.slow
def test_an_idle_page_makes_no_requests(browser: Browser, sqlite_url: str) -> None:
    with explored_service(sqlite_url) as explored, explored.visitor(browser) as visitor:
        # The end of a worker is an event; here nothing is to happen any more.
        explored.http.delete(f"/workers/{explored.worker}")
        page = visitor.open("/campaigns/first")
        expect_live(page)
        page.wait_for_timeout(2000)
        asked: list[str] = []
        page.context.on("request", lambda request: asked.append(request.url))
        page.get_by_role("link", name="Skip to the content").focus()
        page.keyboard.press("Enter")  # a jump within the page asks for nothing
        page.wait_for_timeout(5000)
        # The browser loads the icon of a page when it likes.
        assert not [url for url in asked if not url.endswith("icon.svg")]


@pytest.mark.slow
def test_a_page_says_that_the_service_is_gone_and_recovers(
    browser: Browser, tmp_path: Path
) -> None:
    service = ServeProcess(tmp_path)
    with closing(TimelyStore(DataDir(tmp_path).database_url)) as store, ExitStack() as stack:
        stack.callback(service.end)
        worker = service.post("/workers", INTRODUCED)["worker_id"]
        about = {"http": service.http, "worker": worker, "admin_token": service.token}
        explored = Explored(url=service.url, store=store, **about)
        campaign = explored.submit("survives")
        explored.measure(campaign, 3)
        with explored.visitor(browser) as visitor:
            page = visitor.open("/campaigns/survives")
            expect_live(page)
            service.end(signal.SIGKILL)
            expect(page.locator("#connection")).to_have_text("connection lost; trying again")
            # While nobody serves, somebody else's outcome reaches the database.
            trial = store.trials.add(campaign, LAYOUTS[0])
            (lease,) = take_leases(store, worker, 1)
            outcome = completed(LAYOUTS[0], tokens_per_s=3000.0)
            post_outcome(store, trial.id, lease.attempt, outcome)
            service.start(service.url.rpartition(":")[2])
            expect_live(page)
            expect(page.locator("#rank-1")).to_contain_text("3,000")
            visitor.faults.clear()  # the browser reports refused connections
