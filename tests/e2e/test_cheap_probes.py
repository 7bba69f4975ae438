"""A real worker runs cheap probes, and then a layout in full; and a probe that others disturb."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from benchmarks.service.live_service import LiveService, wait_until
from layout_tuner.predictions.statistics.disturbance import DISTURBED_SHARE
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.tuner.driver.driver import Driver
from tests.e2e.conftest import Service
from tests.kit.campaigns import space_of
from tests.tuner.driver.test_cheap_probes import NUM_CHEAP, part_first
from tests.workers.busy_cores import busy

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

SPACE = space_of(global_batch_size=64, dp=[1, 2], micro_batch_size=[1, 2])


@dataclass(frozen=True, kw_only=True)
class EndedCampaign:
    """A campaign of cheap probes and one layout in full, on a worker of this machine."""

    record: CampaignRecord
    parts: list[TrialRecord]
    whole: TrialRecord
    ranked: list[RankedLayout]
    losses: dict[int, float]
    """First loss by trial."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> EndedCampaign:
    budget = {"node_hours": 1.0, "trials": NUM_CHEAP + 1}
    with (
        pytest.MonkeyPatch.context() as patch,
        LiveService(tmp_path_factory.mktemp("cheap")) as service,
    ):
        proposers = part_first(patch)
        created = service.submit(
            strategy="guided", budget=budget, space=SPACE, stop={"remeasure": 0}
        )
        service.worker().start()
        store, driver = service.store, Driver(service.store)

        def has_ended() -> bool:
            driver.step()
            return store.campaigns.get(created["id"]).ended_at is not None

        wait_until("the campaign has ended", has_ended, 150.0)
        record, trials = store.campaigns.get(created["id"]), store.trials.find(created["id"])
        assert len(proposers) == 1
        assert [trial.state for trial in trials] == ["COMPLETED"] * (NUM_CHEAP + 1), trials
        *parts, whole = trials
        return EndedCampaign(
            record=record,
            parts=parts,
            whole=whole,
            ranked=store.leaderboard.ranked_layouts(record.id, record.objective),
            losses={each.id: store.trials.detail(each.id).iterations[0].loss for each in trials},
        )


@pytest.mark.slow
def test_an_outcome_has_the_tokens_and_costs_of_what_ran(ended: EndedCampaign) -> None:
    sequence = ended.record.spec["model"]["seq_length"]
    for trial in (*ended.parts, ended.whole):
        assert trial.measurement.tokens_per_step == trial.layout.global_batch_size * sequence
        assert trial.cost.iterations > 0 < trial.cost.start


@pytest.mark.slow
def test_a_cheap_probe_runs_a_part_of_its_layout(ended: EndedCampaign) -> None:
    for part in ended.parts:
        assert (part.layout.num_microbatches, part.num_layers) == (8, 2)
        assert part.layout.global_batch_size < part.full_layout.global_batch_size == 64


@pytest.mark.slow
def test_a_layout_of_a_cheap_probe_is_run_whole_and_ranked(ended: EndedCampaign) -> None:
    assert ended.whole.layout in [part.full_layout for part in ended.parts]
    assert ended.whole.layout.global_batch_size == 64
    assert [each.trial.id for each in ended.ranked] == [ended.whole.id]


@pytest.mark.slow
def test_a_cheap_probe_has_about_the_same_loss_and_less_memory(ended: EndedCampaign) -> None:
    """Half of the layers have less to keep; an untrained model's loss is about the same."""
    (part, *_), whole = ended.parts, ended.whole
    assert ended.losses[part.id] == pytest.approx(ended.losses[whole.id], rel=0.1)
    (of_whole, *_) = (part for part in ended.parts if part.full_layout == whole.layout)
    assert _peak(of_whole) < _peak(whole)


def _peak(trial: TrialRecord) -> int:
    return trial.measurement.peak_memory_bytes


@pytest.mark.nightly
def test_a_probe_beside_busy_processes_is_marked_on_the_leaderboard(service: Service) -> None:
    """The fast suite has both halves of the way: the ranks in tests/workers/trainer, and the pages
    in tests/api/routes/test_disturbed_trials.py.
    """
    with busy(os.sched_getaffinity(0), 2):
        campaign = service.submit(budget={"trials": 1}, stop={"remeasure": 0})["id"]
        (trial,) = service.wait_for_completed(campaign, 1)
    assert trial["measurement"]["others_share"] > DISTURBED_SHARE
    root = str(service.http.base_url).removesuffix("/v1/")
    page = service.http.get(f"{root}/campaigns/e2e", headers={"Accept": "text/html"})
    assert '<span class="mark">disturbed</span>' in page.text
    shown = service.run("trial", "show", "e2e/1").stdout
    assert "of a device's time, disturbed" in shown
