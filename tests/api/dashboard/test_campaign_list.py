from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from api.dashboard import campaign_list
from tests.api.dashboard.browser import Visitor, assert_accessible
from tests.api.dashboard.explored import Explored


def row(page: Page, name: str) -> Locator:
    return page.locator("#campaigns tbody tr").filter(
        has=page.get_by_role("link", name=name, exact=True)
    )


def test_campaigns_are_listed_with_their_progress_and_filtered_by_the_address(
    visitor: Visitor, explored: Explored
) -> None:
    page = visitor.open("/")
    first = row(page, "first")
    expect(first).to_contain_text("RUNNING")
    expect(first).to_contain_text("12 of 12")
    expect(first).to_contain_text("3,000 tokens/s")
    expect(first.locator("td").nth(8)).to_have_text("2")
    expect(page.locator("#connection")).to_have_text("live")

    explored.submit("to-be-paused")
    explored.post("/campaigns/to-be-paused/pause")
    page.get_by_label("State").select_option("PAUSED")
    expect(page).to_have_url(re.compile("state=PAUSED$"))
    expect(row(page, "to-be-paused")).to_be_visible()
    expect(row(page, "first")).to_have_count(0)
    page.get_by_role("link", name="All campaigns").click()
    expect(row(page, "first")).to_be_visible()
    page.get_by_label("Name contains").fill("IRS")
    page.get_by_label("Name contains").press("Enter")
    expect(page).to_have_url(re.compile("name_contains=IRS"))
    expect(page.locator("#campaigns tbody tr")).to_have_count(1)
    page.go_back()
    expect(row(page, "both")).to_be_visible()
    page.get_by_label("Name contains").fill("nothing-has-this")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("No campaign passes the filters.")).to_be_visible()


def test_campaigns_are_compared_with_what_differs_marked(visitor: Visitor) -> None:
    page = visitor.open("/")
    page.get_by_label("Compare first").check()
    page.get_by_label("Compare both").check()
    page.get_by_role("button", name="Compare the ticked campaigns").click()
    expect(page.get_by_role("heading", name="Compare campaigns")).to_be_visible()
    expect(page.get_by_text("1.000 times")).to_be_visible()
    objective = page.locator("tr").filter(has_text="objective")
    expect(objective).to_contain_text("differs")
    expect(page.locator("tr").filter(has_text="cluster").first).not_to_contain_text("differs")
    assert_accessible(page)


@pytest.mark.slow
def test_campaigns_of_different_objectives_are_not_compared(
    visitor: Visitor, explored: Explored
) -> None:
    other = explored.submit("by-device", objective="tokens_per_s_per_device")
    explored.measure(other, 0)
    explored.submit("nothing-measured")
    page = visitor.open(
        "/compare-campaigns?campaign=first&campaign=by-device&campaign=nothing-measured"
    )
    expect(page.get_by_text("they are ranked by tokens/s/device and by tokens/s")).to_be_visible()
    expect(page.get_by_text("The winner of nothing-measured cannot be compared")).to_be_visible()
    visitor.open("/compare-campaigns?campaign=first")
    expect(page.get_by_text("1 campaign cannot be compared: tick 2 to 8")).to_be_visible()
    visitor.faults.clear()  # the browser reports the status 422


@pytest.mark.slow
def test_without_a_script_the_list_is_filtered_and_has_pages(
    browser: Browser, explored: Explored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_list, "PAGE", 5)
    for number in range(6):
        explored.submit(f"many-{number}")
    with explored.visitor(browser, java_script_enabled=False) as visitor:
        visitor.is_checked = False  # there is no script to ask about violations
        page = visitor.open("/")
        page.get_by_label("State").select_option("RUNNING")
        page.get_by_label("Name contains").fill("many-")
        page.get_by_role("button", name="Filter").click()
        expect(page.get_by_text("1 to 5 of 6 campaigns")).to_be_visible()
        page.get_by_role("link", name="Older").click()
        expect(page.get_by_text("6 to 6 of 6 campaigns")).to_be_visible()
        expect(row(page, "many-0")).to_be_visible()
        page.get_by_role("link", name="Newer").click()
        expect(row(page, "many-5")).to_be_visible()
