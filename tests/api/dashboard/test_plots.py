from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.api.dashboard.browser import (
    Visitor,
    assert_accessible,
    assert_contrast,
    assert_fits,
    look_at,
)
from tests.api.dashboard.plotted_campaign import Plotted, plotted_service
from tests.kit.api import HEADERS, answered
from tests.kit.postgres import upgraded
from tests.kit.store import completed, failed, lease_one, make_spec, make_worker, post_outcome
from tests.results_db.campaigns.test_imported_tables import varied_rows
from tests.search_spaces.tables.tables import make_text

PLOTS = "/campaigns/plotted/plots"
TIMELINE = "/campaigns/plotted/timeline"
TRIALS = 30
POINTS = ".scatterlayer .points path.point"
NUMBER_OF_ELEMENTS = "(element, which) => element.querySelectorAll(which).length"


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plotted]:
    """One service for the module: tests that change its campaign only add trials."""
    data: Path = tmp_path_factory.mktemp("plotted") / "data"
    with plotted_service(upgraded(data).database_url, trials=TRIALS) as service:
        yield service


@pytest.fixture
def visitor(browser: Browser, plotted: Plotted) -> Iterator[Visitor]:
    with plotted.visitor(browser) as visitor:
        yield visitor


def drawn(page: Page, name: str) -> Any:
    """The element of a plot, once it is drawn."""
    plot = page.locator(f"#plot-{name}")
    plot.scroll_into_view_if_needed()
    expect(plot).to_have_attribute("data-drawn", re.compile(r"\d+"))
    return plot


def count(page: Page, name: str, which: str = POINTS) -> int:
    """Elements of a drawn plot."""
    return int(drawn(page, name).evaluate(NUMBER_OF_ELEMENTS, which))


def figure(plotted: Plotted, name: str, **query: str) -> dict[str, Any]:
    """The data of a plot."""
    path = f"/campaigns/plotted/figures/{name}.json?{httpx.QueryParams(query)}"
    return json.loads(page_of(plotted, path))


def number_of_points(found: dict[str, Any]) -> int:
    """Markers that a figure has."""
    return sum(len(t["x"]) for t in found["data"] if t.get("mode") == "markers")


def test_every_plot_is_drawn_with_its_points(visitor: Visitor, plotted: Plotted) -> None:
    page = visitor.open(PLOTS)
    for name in ("history", "parallel", "pareto", "estimated-time", "estimated-memory"):
        assert count(page, name) == number_of_points(figure(plotted, name)) > 20, name
    expected = number_of_points(figure(plotted, "slice", knob="tp"))
    assert count(page, "slice-tp") == expected > 20
    lines = [t for t in figure(plotted, "parallel")["data"] if t["mode"] == "lines"]
    # Each layout is a line from the first axis on.
    assert count(page, "parallel", ".lines path.js-line") == sum(t["x"].count(0) for t in lines)
    assert count(page, "two-knobs", ".heatmaplayer image") == 1
    cells = figure(plotted, "two-knobs")["data"][0]["z"]
    tried = sum(value is not None for row in cells for value in row)
    assert count(page, "two-knobs", ".heatmap-label") == tried
    parts = [t for t in figure(plotted, "time-parts")["data"] if t["type"] == "bar"]
    assert len(parts) == 6
    shown = sum(length != 0 for part in parts for length in part["x"])
    assert count(page, "time-parts", ".barlayer path") == shown > 60
    # The history has every trial that has ended, with two marks on top.
    assert count(page, "history") == TRIALS + 2


@pytest.mark.slow
def test_plots_are_loaded_once_in_view_drawn_again_after_a_gap_and_lead_to_trials(
    visitor: Visitor, plotted: Plotted
) -> None:
    asked: list[str] = []
    visitor.page.on("request", lambda request: asked.append(request.url))
    page = visitor.open("/campaigns/plotted/failures")
    page.wait_for_load_state("load")
    assert not [url for url in asked if "plot" in url.rsplit("/", 1)[1]]
    page.get_by_role("link", name="Plots").click()
    drawn(page, "history")
    assert len([url for url in asked if url.endswith("plotly.js")]) == 1
    # Plots far below wait until a reader gets there.
    assert not [url for url in asked if "estimated-memory" in url]
    drawn(page, "estimated-memory")
    assert len([url for url in asked if url.endswith("plotly.js")]) == 1

    expect(drawn(page, "history")).to_have_attribute("data-drawn", "1")
    page.evaluate("() => { take({ kind: 'stream.lost' }); }")
    page.evaluate("() => { take({ kind: 'stream.opened', event: { missed: false } }); }")
    expect(page.locator("#plot-history")).to_have_attribute("data-drawn", "2")

    opened: list[str] = []
    page.route("**/trials/*", lambda route: (opened.append(route.request.url), route.abort()))
    point = page.locator("#plot-history .scatterlayer .points path.point").first
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#plot-history .hoverlayer .hovertext")
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function("() => true")
    assert re.search(r"/trials/\d+$", opened[0])
    visitor.faults.clear()  # the request was cut off on purpose


def test_printing_draws_every_plot_in_the_width_of_a_page(
    visitor: Visitor, plotted: Plotted
) -> None:
    page = visitor.open(PLOTS)
    drawn(page, "history")
    on_paper = """() => addEventListener("beforeprint", () => queueMicrotask(() => {
      const all = [...document.querySelectorAll(".plot[data-plot]:not(.empty)")];
      const widths = all.map((e) => e.querySelector(".main-svg")?.clientWidth ?? 0);
      window.printed = { missing: widths.filter((w) => !w).length, widest: Math.max(...widths) };
    }))"""
    page.evaluate(on_paper)
    before = page.locator("#plot-history .main-svg").first.evaluate("(e) => e.clientWidth")
    number = page.locator(".plot[data-plot]").count()
    assert number > 12
    page.pdf(format="A4")
    printed = page.evaluate("() => window.printed")
    assert printed["missing"] == 0
    assert printed["widest"] < 719, "between margins of a centimetre"
    width = "(e, wide) => e.clientWidth === wide"
    page.wait_for_function(
        f"([wide]) => ({width})(document.querySelector('#plot-history .main-svg'), wide)",
        arg=[before],
    )


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("print", 718)])
def test_no_table_or_plot_of_a_report_is_cut(
    visitor: Visitor, plotted: Plotted, media: Any, width: int
) -> None:
    """718 px are A4 between margins of a centimetre."""
    visitor.page.set_viewport_size({"width": width, "height": 900})
    page = visitor.open("/v1/campaigns/plotted/report")
    page.emulate_media(media=media)
    cut = page.evaluate(
        "() => [...document.querySelectorAll('.wide')]"
        ".filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.ariaLabel)"
    )
    assert cut == []
    assert_fits(page)
    board = page.locator('[aria-label="Leaderboard"]')
    for heading in ("MFU", "peak memory", "layout"):
        assert heading in board.locator("thead").inner_text()


def test_plots_and_the_timeline_are_accessible_in_both_themes_and_fit_a_phone(
    browser: Browser, plotted: Plotted
) -> None:
    colour = "(plot) => getComputedStyle(plot.querySelector('.gridlayer path')).stroke"
    with plotted.visitor(browser, color_scheme="light") as visitor:
        page = visitor.open(PLOTS)
        drawn(page, "two-knobs")
        plot = drawn(page, "history")
        page.locator("#rows-history summary").click()
        assert plot.evaluate(colour) == "rgb(217, 222, 229)"
        assert_accessible(page)
        page.emulate_media(color_scheme="dark")
        expect(plot).to_have_attribute("data-drawn", "2")
        assert plot.evaluate(colour) == "rgb(50, 59, 71)"
        assert_contrast(page)
        look_at(visitor.open(TIMELINE))
        page.set_viewport_size({"width": 380, "height": 800})
        visitor.open(PLOTS)
        drawn(page, "history")
        drawn(page, "parallel")
        assert_fits(page)


def test_an_outcome_or_a_choice_changes_a_plot_without_loading_the_page(
    visitor: Visitor, plotted: Plotted
) -> None:
    page = visitor.open(PLOTS)
    before = count(page, "history")
    expect(page.locator("#connection")).to_have_text("live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    layout = Layout(dp=8, num_microbatches=32)
    plotted.run_one(layout, completed(layout, tokens_per_s=3000.0))
    points = page.locator(f"#plot-history {POINTS}")
    expect(points).to_have_count(before + 1)
    expect(page.locator("#about-history")).to_contain_text(f"{TRIALS + 1} trials have ended.")
    # Of the three events that came, one changes this plot.
    assert len([url for url in asked if "history.json" in url]) == 1
    assert not [url for url in asked if "pareto.json" in url]

    page.evaluate("() => (window.same = true)")
    drawn(page, "two-knobs")
    page.locator("#choose-knobs select[name=x]").select_option("pp")
    expect(page).to_have_url(re.compile("x=pp"))
    expect(page.locator("#plot-two-knobs .xtitle")).to_have_text("pipeline parallel, pp")
    assert page.evaluate("() => window.same")


NOTE_WHAT_COMES_AND_IS_ASKED = """() => {
  [window.heard, window.asked] = [[], []];
  document.addEventListener("service-event", ({ detail }) => heard.push(detail.kind));
  const plain = window.fetch;
  window.fetch = (...words) => {
    if (String(words[0]).includes("/figures/")) asked.push(String(words[0]));
    return plain(...words);
  };
}"""


class Listener:
    """A page of plots that notes what it hears and asks for; its clock is turned by the test."""

    def __init__(self, visitor: Visitor, path: str, name: str) -> None:
        visitor.page.clock.install()
        self.page = visitor.open(path)
        self.plot = drawn(self.page, name)
        expect(self.page.locator("#connection")).to_have_text("live")
        self.page.evaluate(NOTE_WHAT_COMES_AND_IS_ASKED)
        self._name = name

    def asked_after(self, kind: str, number: int = 1) -> int:
        """Requests for the plot so far, once the page has heard of so many events of a kind.

        Two seconds of the page's clock go by before: a request that waited for its turn was made.
        """
        heard = "([kind, number]) => heard.filter((each) => each === kind).length >= number"
        self.page.wait_for_function(heard, arg=[kind, number])
        self.page.clock.run_for(2000)
        count = "(name) => asked.filter((url) => url.includes(`/${name}.json`)).length"
        return int(self.page.evaluate(count, self._name))


@pytest.mark.parametrize(
    ("path", "name", "asked"), [(PLOTS, "history", (0, 0, 1)), (TIMELINE, "timeline", (0, 1, 2))]
)
def test_a_plot_is_asked_for_after_the_events_that_change_it(
    visitor: Visitor, plotted: Plotted, path: str, name: str, asked: tuple[int, int, int]
) -> None:
    listener = Listener(visitor, path, name)
    layout = Layout(dp=8, num_microbatches=40 if name == "history" else 48)
    trial = plotted.store.trials.add(plotted.campaign_id, layout)
    after_adding = listener.asked_after("trial.added")
    lease = lease_one(plotted.store, plotted.workers[0])
    after_leasing = listener.asked_after("trial.leased")
    expect(listener.plot).to_have_attribute("data-drawn", str(1 + asked[1]))
    assert post_outcome(plotted.store, trial.id, lease.attempt, failed()).accepted
    listener.asked_after("trial.ended")
    expect(listener.plot).to_have_attribute("data-drawn", str(1 + asked[2]))
    assert (after_adding, after_leasing, listener.asked_after("trial.ended")) == asked


def test_outcomes_during_a_request_for_a_plot_are_one_more_request(
    visitor: Visitor, plotted: Plotted
) -> None:
    listener = Listener(visitor, PLOTS, "history")
    held_back: list[Route] = []

    def hold_the_first_back(route: Route) -> None:
        if held_back:
            route.continue_()
        else:
            held_back.append(route)

    listener.page.route("**/figures/history.json*", hold_the_first_back)
    for number in (1, 2, 3):
        plotted.run_one(Layout(dp=8, num_microbatches=48 + 8 * number), failed())
        assert listener.asked_after("trial.ended", number) == 1
    held_back[0].continue_()
    expect(listener.plot).to_have_attribute("data-drawn", "3")
    assert listener.asked_after("trial.ended", 3) == 2


def test_choices_are_in_the_url_need_no_script_and_wrong_ones_are_refused(plotted: Plotted) -> None:
    page = page_of(plotted, f"{PLOTS}?x=tp&y=recompute&across=tokens_per_s&show=all")
    assert '<option value="tp" selected>' in page
    assert '<option value="tokens_per_s" selected>' in page
    assert '<input type="hidden" name="show" value="all">' in page
    assert "The axes include all values." in page
    drawn_y = figure(plotted, "two-knobs", x="tp", y="recompute")["data"][0]["y"]
    assert drawn_y == ["none", "selective", "full"]

    wrong = [f"{PLOTS}?{query}" for query in ("x=nodes", "up=speed", "show=some")]
    for path in (*wrong, "/campaigns/plotted/figures/pie.json"):
        answered(httpx.get(f"{plotted.url}{path}", headers=HEADERS), 422)


def test_the_timeline_shows_attempts_failures_and_what_runs(
    visitor: Visitor, plotted: Plotted
) -> None:
    page = visitor.open(TIMELINE)
    found = {trace["name"]: trace for trace in figure(plotted, "timeline")["data"]}
    bars = [len(trace["x"]) for trace in found.values() if trace["type"] == "bar"]
    assert count(page, "timeline", ".barlayer path") >= sum(bars) > TRIALS
    assert [len(found[name]["x"]) for name in ("running", "winner", "baseline")] == [1, 1, 1]
    assert count(page, "timeline", ".scatterlayer path.point") == 2
    link = page.locator("#table-timeline a").first
    expect(link).to_have_attribute("href", re.compile(r"/trials/\d+$"))
    row = page.get_by_role("row").filter(has_text="crashed").last
    expect(row).to_contain_text("FAILED")
    expect(page.get_by_role("columnheader", name="node-1")).to_be_visible()


def page_of(plotted: Plotted, path: str) -> str:
    return answered(httpx.get(f"{plotted.url}{path}", headers=HEADERS), 200).text


def test_pages_of_an_early_campaign_say_what_it_lacks(plotted: Plotted) -> None:
    store = plotted.store
    campaign = store.campaigns.create(make_spec("early", cluster="other"), num_legal_layouts=9).id
    none = page_of(plotted, "/campaigns/early/plots")
    for words in ("No trial has ended yet.", "No layout has been tried yet.", "no analysis yet"):
        assert words in none
    assert "No worker has leased a trial" in page_of(plotted, "/campaigns/early/timeline")
    assert "No trial has failed." in page_of(plotted, "/campaigns/early/timeline")
    worker = make_worker(store, "w3", cluster="other").id
    early = replace(plotted, campaign_id=campaign, workers=[worker])
    early.run_one(Layout(tp=2, num_microbatches=2), failed("out_of_memory"))
    early.run_one(Layout(tp=1), failed())
    assert "so there is no best yet" in page_of(plotted, "/campaigns/early/plots")
    assert "2 trials failed." in page_of(plotted, "/campaigns/early/timeline")
    early.run_one(Layout(pp=2), completed(Layout(pp=2)))
    one = page_of(plotted, "/campaigns/early/plots")
    assert "The best so far is trial 3 with 500 tokens/s/device" in one


def test_pages_of_an_imported_campaign_say_what_it_lacks(plotted: Plotted) -> None:
    url = f"{plotted.url}/v1/campaigns/import?name=theirs"
    content, headers = make_text(*varied_rows()).encode(), {**HEADERS, "Content-Type": "text/csv"}
    answered(httpx.post(url, content=content, headers=headers), 201)
    page = page_of(plotted, "/campaigns/theirs/plots")
    for words in ("The best so far is trial", "Imported campaigns have none.", "No estimates"):
        assert words in page
    assert "imported, without the times of nodes" in page_of(plotted, "/campaigns/theirs/timeline")


def test_names_of_nodes_are_text_and_not_markup(plotted: Plotted) -> None:
    layout = Layout(tp=2, dp=4, num_microbatches=64)
    plotted.run_one(layout, failed(node="<img src=x>"))
    page = page_of(plotted, TIMELINE)
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page
