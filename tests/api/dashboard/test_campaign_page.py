"""The list of campaigns, the pages of one, and what is done there."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from layout_tuner.api.dashboard import campaign_list
from layout_tuner.api.html import leaderboard_table
from tests.api.dashboard.browser import Visitor, assert_accessible, look_at
from tests.api.dashboard.explored import LAYOUTS, Explored
from tests.kit.api import HEADERS, answered
from tests.kit.store import make_spec

ODD = "<script>window.hacked = 1</script>\"'& \u202eabc\x07"


def rows(page: Page) -> Locator:
    return page.locator("#leaderboard tbody tr")


def trials(page: Page) -> list[str]:
    return [words.split()[0] for words in page.locator("#leaderboard tbody th").all_inner_texts()]


def test_the_page_begins_with_the_winner_and_a_heading_sorts_by_the_address(
    visitor: Visitor,
) -> None:
    page = visitor.open("/campaigns/first")
    lead = page.locator("#finding .lead").first
    expect(lead).to_contain_text("The best of 10 measured layouts runs at 3,000 tokens/s")
    expect(lead).to_contain_text("5 others cannot be told apart from it")
    expect(lead).to_contain_text("times the median of the 9 layouts that were measured")
    expect(lead).to_contain_text("1 more layout was stopped early")
    expect(page.get_by_role("link", name="export it for a training job")).to_be_visible()
    expect(page.get_by_text("The same in all 10 layouts")).to_contain_text("batch 8")
    expect(rows(page)).to_have_count(10)
    expect(rows(page).nth(1)).to_contain_text("tied")
    expect(page.locator("tr", has_text="stopped early")).to_have_count(1)
    heading = page.locator("#leaderboard thead").get_by_role("link", name="mbs")
    heading.click()
    expect(page).to_have_url(re.compile(r"sort=micro_batch_size&order=asc$"))
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("mbs")
    ascending = trials(page)
    heading.click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("mbs")
    sizes = [LAYOUTS[int(number) - 1].micro_batch_size for number in trials(page)]
    assert sizes == sorted(sizes, reverse=True)
    page.go_back()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("mbs")
    assert trials(page) == ascending
    page.locator("#leaderboard thead").get_by_role("link", name="rank").click()
    expect(rows(page).first).to_contain_text("3,000")


def test_knobs_and_metrics_filter_and_columns_are_chosen(
    visitor: Visitor, explored: Explored
) -> None:
    page = visitor.open("/campaigns/first")
    page.locator("#facet-tp summary").click()
    page.locator("#facet-tp").get_by_label("2").check()
    expect(page).to_have_url(re.compile(r"\?tp=2$"))
    expect(rows(page)).to_have_count(6)
    expect(page.locator("#facet-tp summary b")).to_have_text("2")
    expect(page.get_by_text("The same in all 6 layouts")).to_contain_text("tp 2")
    page.locator("#facet-bounds summary").click()
    page.get_by_label("tokens/s, at least", exact=True).fill("2300")
    page.get_by_label("tokens/s, at least", exact=True).press("Enter")
    expect(rows(page)).to_have_count(3)
    page.locator("#facet-columns summary").click()
    page.locator("#facet-columns").get_by_label("step time").check()
    expect(page.locator("#leaderboard thead")).to_contain_text("step time")
    expect(page.locator("#leaderboard thead")).not_to_contain_text("MFU")
    csv = page.get_by_role("link", name="CSV").get_attribute("href")
    table = answered(httpx.get(f"{explored.url}{csv}", headers=HEADERS, trust_env=False), 200)
    assert len(table.text.splitlines()) == 4
    page.get_by_role("link", name="Reset").click()
    expect(rows(page)).to_have_count(10)
    expect(page.locator("tr.changed")).to_have_count(0)  # that marks rows which events change


@pytest.mark.parametrize("scripts", [True, False])
def test_the_values_of_a_filter_of_a_long_list_come_when_it_is_opened(
    browser: Browser, explored: Explored, monkeypatch: pytest.MonkeyPatch, scripts: bool
) -> None:
    monkeypatch.setattr(leaderboard_table, "_COUNTED_AT_ONCE", 9)
    with explored.visitor(browser, java_script_enabled=scripts) as visitor:
        page = visitor.open("/campaigns/first?pp=1")
        facet = page.locator("#facet-pp")
        assert facet.get_by_role("checkbox", include_hidden=True).count() == 1
        facet.locator("summary").click()
        if not scripts:
            facet.get_by_role("link", name="Show all values").click()
        expect(facet.locator("label")).to_have_text(
            [re.compile(r"1 \(6\)"), re.compile(r"2 \(4\)")]
        )
        expect(facet.get_by_label("1 (6)")).to_be_checked()
        # `check` would look at the box afterwards, which the new list may have replaced by then.
        facet.get_by_label("2 (4)").click()
        if not scripts:
            page.get_by_role("button", name="Apply").click()
        expect(page).to_have_url(re.compile(r"[?&]pp=1&pp=2"))
        expect(rows(page)).to_have_count(10)
        expect(facet.locator("summary b")).to_have_text("1, 2")


@pytest.mark.slow
def test_ticked_trials_are_compared_and_the_front_of_several_objectives_is_marked(
    visitor: Visitor,
) -> None:
    page = visitor.open("/campaigns/first")
    page.get_by_label("Jump to trial").fill("12")
    page.get_by_role("button", name="Jump").click()
    expect(page).to_have_url(re.compile("#rank-10$"))
    expect(page.locator("#rank-10")).to_contain_text("12")
    page.get_by_label("Jump to trial").fill("5")
    page.get_by_role("button", name="Jump").click()
    expect(page.get_by_text("This trial is not on the leaderboard")).to_be_visible()

    page = visitor.open("/campaigns/first")
    page.get_by_label("Compare trial 1", exact=True).check()
    page.get_by_label("Compare trial 2", exact=True).check()
    with page.expect_request(re.compile("/compare")) as asked:
        page.get_by_role("button", name="Compare the ticked trials").click()
    assert asked.value.url.count("trial=") == 2
    expect(page.get_by_role("heading", level=1)).to_contain_text("trials")

    page = visitor.open("/campaigns/both")
    expect(rows(page).first).to_contain_text("front")
    page.get_by_label("only the front").check()
    expect(page).to_have_url(re.compile("front=true"))
    for line in rows(page).all():
        expect(line).to_contain_text("front")


def test_a_wrong_filter_is_a_sentence_and_keeps_the_page(visitor: Visitor) -> None:
    page = visitor.open("/campaigns/first")
    page.locator("#facet-bounds summary").click()
    page.get_by_label("MFU, at least").fill("0.9")
    page.get_by_label("MFU, at most").fill("0.1")
    page.get_by_label("MFU, at most").press("Enter")
    expect(page.locator("#messages")).to_contain_text("no trial is between them")
    expect(rows(page)).to_have_count(10)
    visitor.faults.clear()
    visitor.open("/campaigns/first?columns=mfu")
    expect(page.get_by_text("The query parameter 'columns' is unknown")).to_be_visible()
    page.get_by_role("link", name="This page without its filters").click()
    expect(rows(page)).to_have_count(10)
    visitor.open("/campaigns/nobody")
    expect(page.get_by_text("There is no campaign named 'nobody'.")).to_be_visible()
    expect(page.get_by_role("link", name="Campaigns", exact=True)).to_be_visible()
    assert len(visitor.faults) == 2  # the browser reports both statuses
    visitor.faults.clear()


def test_the_keyboard_is_enough_for_the_leaderboard(visitor: Visitor) -> None:
    page = visitor.open("/campaigns/first")
    page.locator("#facet-pp summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page).to_have_url(re.compile(r"pp=1"))
    expect(rows(page)).to_have_count(6)
    heading = page.locator("#leaderboard thead").get_by_role("link", name="peak memory")
    heading.focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("sort=peak_memory_bytes"))
    # The focus stays on the heading, so that the next key works on it again.
    expect(heading).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("order=desc"))


def test_names_and_notes_with_markup_are_shown_as_text(
    visitor: Visitor, explored: Explored
) -> None:
    spec = make_spec(ODD, cluster=ODD)
    campaign = explored.store.campaigns.create(
        {**spec, "model": {"name": ODD}}, num_legal_layouts=4
    )
    explored.store.campaigns.update(campaign.id, notes=f"line 1\n{ODD}")
    page = visitor.open("/")
    page.get_by_role("link", name="<script>").click()
    expect(page).to_have_url(f"{explored.url}/campaigns/{campaign.id}")
    for path in ("", "/trials", "/failures", "/events"):
        visitor.open(f"/campaigns/{campaign.id}{path}")
        heading = page.get_by_role("heading", level=1)
        expect(heading).to_contain_text("<script>window.hacked = 1</script>\"'&")
        expect(heading).to_contain_text("\\u202eabc\\u0007")
        assert page.evaluate("() => window.hacked") is None
    visitor.open("/")  # a page of the campaign would ask for what is gone
    explored.store.campaigns.cancel(campaign.id)
    explored.store.campaigns.delete(campaign.id)

    lacks = {"lacks": "sinks & <b>biases</b>", "attention": "fused"}
    explored.submit("lacking", model={"preset": "tiny", **lacks})
    page = visitor.open("/campaigns/lacking/trials")
    expect(page.locator("#head")).to_contain_text("tiny-custom (attention=fused) on ")
    expect(page.locator("#lacks")).to_have_text(
        "The model lacks what the published one has besides: sinks & <b>biases</b>."
    )
    expect(visitor.open("/campaigns/first").locator("#lacks")).to_have_count(0)


def test_the_winner_is_compared_with_the_baseline(visitor: Visitor, explored: Explored) -> None:
    baseline = {"tp": 1, "pp": 2, "micro_batch_size": 1, "num_microbatches": 8}
    campaign = explored.submit("has-a-baseline", baseline=baseline)
    page = visitor.open("/campaigns/has-a-baseline")
    expect(page.locator("#finding")).to_contain_text("The baseline, nodes 1, tp 1, pp 2")
    explored.measure(campaign, 0)
    explored.measure(campaign, 3)
    expect(page.locator("#finding")).to_contain_text("That is 1.071 times the baseline")
    expect(page.locator("#rank-2")).to_contain_text("baseline")
    visitor.open("/campaigns/has-a-baseline/trials")
    expect(page.get_by_role("row").filter(has_text="baseline")).to_have_count(1)
    one, two = (explored.store.trials.by_number(campaign, number).id for number in (1, 2))
    for trial, number in ((one, 0), (two, 1)):
        visitor.open(f"/trials/{trial}")
        expect(page.locator("h1 .mark")).to_have_count(number)
    visitor.open(f"/compare?trial={one}&trial={two}")
    heads = page.get_by_role("region", name="Knob").locator("thead th")
    expect(heads.nth(2)).to_have_text("has-a-baseline, trial 1")
    expect(heads.nth(3)).to_contain_text("has-a-baseline, trial 2 baseline")
    explored.post("/campaigns/has-a-baseline/cancel")


@pytest.mark.parametrize(
    "paths",
    [
        ["/campaigns/both"],
        pytest.param(
            ["/", *(f"/campaigns/first/{page}" for page in ("trials", "failures", "events"))],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pages_of_campaigns_are_accessible_and_fit(visitor: Visitor, paths: list[str]) -> None:
    for path in paths:
        look_at(visitor.open(path), folded="main details")


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
    expect(page.get_by_text("1 trial, all logs, and the measurements of 1 layout,")).to_be_visible()
    expect(page.get_by_role("link", name="goes-on-from-it")).to_be_visible()
    confirm(page, "Delete to-end", "deleted for good, with 1 trial.")
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
