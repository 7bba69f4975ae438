"""Pages of cheap probes and of simulated campaigns: neither is ranked with full measurements."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, expect

from layout_tuner.api.html.result_sentences import short_layout
from layout_tuner.api.plot_data.campaign_plots import CampaignPlots, PlotChoices
from layout_tuner.api.plot_data.plot_data import PlottedData
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, simulator_trainer
from tests.api.dashboard.browser import look_at
from tests.api.dashboard.explored import Explored
from tests.kit.api import Api, answered, measured_as_asked
from tests.kit.cheap_campaign import CHEAP_CAMPAIGN, FEWER, FULL, ONLY_CHEAP, add_cheap_campaign
from tests.kit.store import make_iterations, post_outcome


def page(api: Api, path: str, **query: object) -> str:
    """The text of a page, without its elements."""
    answer = answered(api.http.get(path, params=query), 200)
    text = html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", answer.text, flags=re.S))
    return re.sub(r"\s+", " ", text)


def drawn_trials(figure: PlottedData) -> set[int]:
    """The ids of the trials that a figure draws."""
    return {
        trial for trace in figure.traces for trial in trace.get("customdata", ()) if trial
    } | set(figure.row_ids)


@pytest.fixture(scope="module")
def large(lasting: TestClient) -> Api:
    """With the campaign of cheap probes, and one without any, which is called `first`."""
    api = Api(lasting)
    add_cheap_campaign(api)
    api.submit()
    return api


@pytest.fixture(scope="module")
def ids(large: Api) -> dict[int, int]:
    """Trials of the campaign by their numbers."""
    trials = large.get("/campaigns/large/trials")["trials"]
    return {trial["number"]: trial["id"] for trial in trials}


def test_a_cheap_probe_says_which_layout_it_stands_for_and_which_trial_measured_it_in_full(
    large: Api, ids: dict[int, int]
) -> None:
    step = large.get(f"/trials/{ids[1]}")["cheap_probe"]["full_step"]
    text = page(large, f"/trials/{ids[1]}")
    assert f"It is a cheap probe of the layout {short_layout(FULL)}" in text
    assert "it runs 8 of 64 micro-batches, 1 of 2 replicas." in text
    words = f"{step['expected_s']:.4g} s (95 %: {step['low_s']:.4g} to {step['high_s']:.4g} s)"
    assert text.count(words) == 2
    assert "Trial 3 measured the layout in full: 1 s a step." in text
    assert "shared devices" not in text
    assert "cheap" not in page(large, f"/trials/{ids[3]}")


def test_a_running_cheap_probe_counts_towards_the_iterations_of_a_cheap_one(large: Api) -> None:
    probe = {"iterations": 100, "warmup": 3}
    large.post("/campaigns", {**CHEAP_CAMPAIGN, "name": "under-way", "probe": probe}, status=201)
    campaign_id = large.store.campaigns.by_name("under-way").id
    for fidelity, asked in ((FEWER, 7), (None, 103)):
        large.store.trials.add(campaign_id, FULL, fidelity=fidelity)
        lease = large.lease(large.register(f"under-way-{asked}"))
        assert lease["request"]["warmup"] + lease["request"]["iterations"] == asked
        text = page(large, f"/trials/{lease['trial_id']}")
        assert f"0 iterations are done, of about {asked}." in text
    large.post("/campaigns/under-way/cancel")


def test_a_cheap_probe_of_fewer_layers_says_that_it_tells_no_memory_and_how_to_run_it(
    large: Api, ids: dict[int, int]
) -> None:
    text = page(large, f"/trials/{ids[2]}")
    assert "it says nothing of the layout's memory" in text
    assert "in full:" not in text
    assert "layout-tuner probe --model model.yaml" in text
    assert "name: tiny-2-layers" in text
    assert " --steps 4 " in text, "as many as it timed"
    assert "--steps" not in page(large, f"/trials/{ids[3]}")


def test_lists_and_comparisons_of_trials_mark_cheap_probes(large: Api, ids: dict[int, int]) -> None:
    step = large.get(f"/trials/{ids[2]}")["cheap_probe"]["full_step"]["expected_s"]
    text = page(large, "/campaigns/large/trials")
    assert f"{short_layout(ONLY_CHEAP)} (runs 8 of 64 micro-batches, 2 of 4 layers)" in text
    assert f"extrapolated step {step:.4g} s (95 %" in text
    compared = page(large, "/compare", trial=[ids[1], ids[3]])
    assert "trial 1 cheap probe" in compared


def test_a_campaign_counts_its_cheap_probes_and_ranks_none(large: Api) -> None:
    text = page(large, "/campaigns/large")
    assert "Beside these: 2 cheap probes, " in text
    assert "are not ranked" in text
    assert "cheap" not in page(large, "/campaigns/first")


@pytest.fixture
def plots(large: Api) -> CampaignPlots:
    campaign = large.store.campaigns.by_name("large")
    return CampaignPlots(store=large.store, campaign=campaign, choices=PlotChoices())


def test_plots_of_layouts_leave_cheap_probes_out(plots: CampaignPlots, ids: dict[int, int]) -> None:
    assert plots.facts.num_layouts == 1
    for name in ("parallel", "slice", "two-knobs", "time-parts"):
        assert drawn_trials(plots.data_of(name)) <= {ids[3]}, name  # type: ignore[arg-type]
    figure = plots.data_of("history")
    assert drawn_trials(figure) == {ids[3]}
    assert "1 trial has ended." in figure.says
    assert "2 cheap probes of parts of layouts: not drawn." in figure.says


@pytest.mark.parametrize("name", ["estimated-time", "estimated-memory"])
def test_plots_of_estimates_draw_the_part_of_a_layout_that_ran(
    plots: CampaignPlots, ids: dict[int, int], name: Any
) -> None:
    figure = plots.data_of(name)
    assert drawn_trials(figure) == set(ids.values())
    assert "2 cheap probes: estimated and measured is the part that ran." in figure.says


def test_pages_with_cheap_probes_fit_a_phone_and_are_accessible(
    browser: Browser, explored: Explored
) -> None:
    campaign = explored.post("/campaigns", CHEAP_CAMPAIGN)["id"]
    for fidelity in (FEWER, None):
        trial = explored.store.trials.add(campaign, FULL, fidelity=fidelity)
        ask = {"max_trials": 1, "wait_s": 0}
        (lease,) = explored.post(f"/workers/{explored.worker}/leases", ask)["leases"]
        outcome = measured_as_asked(lease, trial.layout)
        post_outcome(explored.store, trial.id, lease["attempt"], outcome)
    first = explored.store.trials.by_number(campaign, 1).id
    with explored.visitor(browser, "viewer") as visitor:
        for path in ("/campaigns/large", "/campaigns/large/trials", f"/trials/{first}"):
            page = visitor.open(path)
            expect(page.locator("main")).to_contain_text("cheap probe")
            look_at(page)
        page.get_by_role("link", name="Measured in full: trial 2").click()
        expect(page.get_by_role("heading", name="Trial 2 COMPLETED")).to_be_visible()


MARK = "simulated, not measured (simulator 2, seed 3)"


class Rehearsed(NamedTuple):
    """A service with a simulated campaign, `rehearsal`, and a measured one, `measured`."""

    api: Api
    simulated: int
    """The only trial of the one."""
    measured: int
    """The only trial of the other."""


@pytest.fixture(scope="module")
def rehearsed(lasting: TestClient) -> Rehearsed:
    api = Api(lasting)
    api.submit(name="rehearsal", simulated={"seed": 3})
    api.submit(name="measured")
    about: dict[str, Any] = {"trainers": {simulator_trainer(): "1"}, "device": "simulated CPU core"}
    about["allocation"] = {"launcher": SIMULATED_LAUNCHER}
    worker, simulator = api.register("real"), api.register("sim", **about)
    layout = Layout(tp=2, num_microbatches=8)
    losses = {"loss": None, "grad_norm": None}
    found: dict[str, Any] = {"trainer": simulator_trainer(), "trainer_version": "1"}
    found["iterations"] = tuple(replace(each, **losses) for each in make_iterations(1.0))
    return Rehearsed(
        api=api,
        simulated=api.complete(simulator, "rehearsal", layout, losses_comparable=False, **found),
        measured=api.complete(worker, "measured", layout),
    )


def test_every_page_of_a_simulated_campaign_and_of_no_other_says_so(rehearsed: Rehearsed) -> None:
    for name, trial in (("rehearsal", rehearsed.simulated), ("measured", rehearsed.measured)):
        pages = [
            f"/campaigns/{name}/{tab}".rstrip("/") for tab in ("", "trials", "plots", "export")
        ]
        for path in (*pages, f"/trials/{trial}", f"/v1/campaigns/{name}/report"):
            text = page(rehearsed.api, path)
            assert (f"Everything here is {MARK}." in text) == (name == "rehearsal"), path
    text = page(rehearsed.api, "/campaigns/rehearsal")
    assert "The only simulated layout runs at" in text
    assert f"Simulated by {simulator_trainer()}, not measured." in text


def test_lists_of_campaigns_and_of_allocations_mark_what_is_simulated(
    rehearsed: Rehearsed,
) -> None:
    listed = page(rehearsed.api, "/")
    assert "rehearsal simulated" in listed
    assert "measured simulated" not in listed
    assert "sim simulated" in page(rehearsed.api, "/allocations")


def test_plots_of_a_simulated_campaign_say_so_and_that_their_time_is_real(
    rehearsed: Rehearsed,
) -> None:
    store = rehearsed.api.store
    campaign = store.campaigns.by_name("rehearsal")
    plots = CampaignPlots(store=store, campaign=campaign, choices=PlotChoices())
    assert plots.data_of("history").says[-1] == f"All of it is {MARK}."
    assert "it has the real time" in plots.data_of("timeline").says[-1]
    assert f"All of it is {MARK}." in page(rehearsed.api, "/campaigns/rehearsal/plots")


def test_a_simulated_campaign_is_compared_with_no_measured_one(rehearsed: Rehearsed) -> None:
    why = f"one is {simulator_trainer()}, the other measured."
    trials = [rehearsed.measured, rehearsed.simulated]
    text = page(rehearsed.api, "/compare", trial=trials)
    assert why in text
    assert "times the" not in text
    assert f"measured {MARK}" in text, "a row says which is which"
    assert why in page(rehearsed.api, "/compare-campaigns", campaign=["measured", "rehearsal"])
