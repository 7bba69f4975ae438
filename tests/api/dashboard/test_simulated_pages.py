"""What pages show of a simulated campaign: a mark on each, and no comparison with measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.plot_data.campaign_plots import CampaignPlots, PlotChoices
from search_spaces.spec.layout import Layout
from search_spaces.trainers.simulator import SIMULATED_LAUNCHER, simulator_trainer
from tests.api.dashboard.test_cheap_probe_pages import page
from tests.kit.api import Api
from tests.kit.store import make_iterations

pytestmark = pytest.mark.sqlite_is_enough

MARK = "simulated, not measured (simulator 1, seed 3)"


@pytest.fixture
def trials(api: Api) -> dict[str, int]:
    """One completed trial of a simulated campaign, and one of a measured one."""
    api.submit(name="rehearsal", simulated={"seed": 3})
    api.submit(name="measured")
    worker = api.register()
    simulator = api.register(
        "sim",
        trainers={simulator_trainer(): "1"},
        allocation={"launcher": SIMULATED_LAUNCHER},
        device="simulated CPU core",
    )
    layout = Layout(tp=2, num_microbatches=8)
    without = {"loss": None, "grad_norm": None}
    return {
        "rehearsal": api.complete(
            simulator,
            "rehearsal",
            layout,
            trainer=simulator_trainer(),
            trainer_version="1",
            iterations=tuple(replace(each, **without) for each in make_iterations(1.0)),
            losses_comparable=False,
        ),
        "measured": api.complete(worker, "measured", layout),
    }


def test_every_page_of_a_simulated_campaign_says_so_and_no_other(
    api: Api, trials: dict[str, int]
) -> None:
    for name, times in (("rehearsal", 1), ("measured", 0)):
        for path in (
            f"/campaigns/{name}",
            f"/campaigns/{name}/trials",
            f"/campaigns/{name}/plots",
            f"/campaigns/{name}/export",
            f"/trials/{trials[name]}",
            f"/v1/campaigns/{name}/report",
        ):
            text = page(api, path)
            assert (f"Everything here is {MARK}." in text) == bool(times), path
    listed = page(api, "/")
    assert "rehearsal simulated" in listed
    assert "measured simulated" not in listed
    assert "sim simulated" in page(api, "/allocations")


def test_plots_and_sentences_say_it_too(api: Api, trials: dict[str, int]) -> None:
    text = page(api, "/campaigns/rehearsal")
    assert "The only simulated layout runs at" in text
    assert f"Simulated by {simulator_trainer()}, not measured." in text
    campaign = api.store.campaigns.by_name("rehearsal")
    plots = CampaignPlots(store=api.store, campaign=campaign, choices=PlotChoices())
    assert plots.data_of("history").says[-1] == f"All of it is {MARK}."
    assert "it has the real time" in plots.data_of("timeline").says[-1]
    assert f"All of it is {MARK}." in page(api, "/campaigns/rehearsal/plots")


def test_a_simulated_trial_is_not_set_against_a_measured_one(
    api: Api, trials: dict[str, int]
) -> None:
    why = f"one is {simulator_trainer()}, the other measured."
    text = page(api, "/compare", trial=[trials["measured"], trials["rehearsal"]])
    assert why in text
    assert "times the" not in text
    assert f"measured {MARK}" in text, "a row says which is which"
    assert why in page(api, "/compare-campaigns", campaign=["measured", "rehearsal"])
