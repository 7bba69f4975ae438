from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.dashboard.browser import Visitor, assert_accessible
from tests.api.dashboard.explored import Explored


def confirm(page: Page, button: str, words: str) -> None:
    """Presses a button, reads the question, and answers it with the same word."""
    page.locator("main").get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(words)
    dialog.get_by_role("button", name=button, exact=True).click()


def test_a_campaign_is_paused_resumed_cancelled_and_deleted(
    visitor: Visitor, explored: Explored
) -> None:
    campaign = explored.submit("to-end")
    explored.measure(campaign, 0)
    explored.submit("goes-on-from-it", start_from=["to-end"])
    page = visitor.open("/campaigns/to-end")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("The campaign is paused: no more trials start")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("The campaign goes on.")).to_be_visible()
    page.get_by_role("button", name="Cancel campaign").click()
    expect(page.get_by_role("dialog")).to_contain_text("This ends to-end for good")
    assert_accessible(page)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert explored.store.campaigns.get(campaign).state == "RUNNING"
    confirm(page, "Cancel campaign", "cannot be resumed")
    expect(page.get_by_text("Workers stop its running trials.")).to_be_visible()
    page.get_by_role("link", name="Delete").click()
    expect(page.get_by_text("1 trials, their logs, and the measurements of 1")).to_be_visible()
    expect(page.get_by_role("link", name="goes-on-from-it")).to_be_visible()
    confirm(page, "Delete to-end", "deleted for good, with 1 trials")
    expect(page.get_by_role("heading", name="This is not possible now")).to_be_visible()
    expect(page.get_by_text("starts from 'to-end' and has not ended")).to_be_visible()
    visitor.faults.clear()  # the browser reports the status 409
    explored.post("/campaigns/goes-on-from-it/cancel")
    visitor.open("/campaigns/to-end/delete")
    confirm(page, "Delete to-end", "deleted for good")
    expect(page.get_by_text("The campaign was deleted")).to_be_visible()


@pytest.mark.slow
def test_a_campaign_is_cloned_and_its_notes_and_budget_change(
    visitor: Visitor, explored: Explored
) -> None:
    explored.submit("to-clone")
    page = visitor.open("/campaigns/to-clone")
    page.get_by_text("Clone, notes and budget").click()
    page.get_by_label("Notes").fill("two\nlines <b>")
    page.get_by_label("Trials", exact=True).fill("7")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("The campaign was changed.")).to_be_visible()
    changed = explored.store.campaigns.by_name("to-clone")
    assert (changed.notes, changed.spec["budget"]["trials"]) == ("two\nlines <b>", 7)
    expect(page.locator(".notes")).to_have_text("two\nlines <b>")
    page.get_by_text("Clone, notes and budget").click()
    page.get_by_label("Trials", exact=True).fill("")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("[data-problem]")).to_contain_text("needs at least one bound")
    page.get_by_role("link", name="Back").click()
    page.get_by_text("Clone, notes and budget").click()
    page.get_by_label("Name of the clone").fill("the-clone")
    confirm(page, "Clone", "starts at once")
    expect(page).to_have_url(re.compile("/campaigns/the-clone"))
    expect(page.get_by_text("This is the clone.")).to_be_visible()
    visitor.faults.clear()


def test_buttons_work_again_after_the_reader_has_gone_back_and_forms_outlive_a_refresh(
    visitor: Visitor,
) -> None:
    page = visitor.open("/campaigns/first")
    # The browser goes nowhere: this stands for a page that it kept and shows again.
    page.route("**/pause", lambda route: route.fulfill(status=204))
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    expect(pause).to_be_disabled()
    page.evaluate("() => dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    expect(pause).to_be_enabled()
    is_kept = """async () => {
        const form = document.querySelector("form[action$='/pause']");
        await new Promise((done) => {
            document.addEventListener("page-swapped", done, { once: true });
            leaving = false;  // as it is five seconds after the click
            refresh();
        });
        return form.isConnected;
    }"""
    assert page.evaluate(is_kept), "each page has another form token"


def test_viewers_and_other_submitters_have_no_buttons(browser: Browser, explored: Explored) -> None:
    for role, number in (("viewer", 0), ("submitter", 1)):
        with explored.visitor(browser, role) as visitor:
            page = visitor.open("/campaigns/first")
            expect(page.locator("#leaderboard tbody tr").first).to_be_visible()
            for button in ("Pause", "Cancel"):
                expect(page.get_by_role("button", name=button)).to_have_count(0)
            expect(page.locator("#more")).to_have_count(number)
            visitor.open("/campaigns/first/trials")
            expect(page.get_by_role("button", name="Repeat")).to_have_count(0)
