"""Plans of campaigns that search job knobs: layouts with their settings are ranked together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.predictions.belief.job_knobs.job_ranking import rank_jobs
from layout_tuner.predictions.belief.job_knobs.plan_gains import KnobGain
from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.belief.plan import Plan, make_plan
from layout_tuner.predictions.belief.plan_text import plan_lines
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.units import GIB

HARMFUL = {
    "kind": "switch",
    "values": [False, True],
    "default": False,
    "effects": [{"value": True, "touches": ["compute"], "factor": 1.4, "log_sd": 0.05}],
}
PACKED = {
    "kind": "word",
    "values": ["plain", "packed"],
    "default": "plain",
    "when": "ep > 1",
    "effects": [{"value": "packed", "touches": ["ep"], "factor": 0.2, "log_sd": 0.1}],
}
SAVES = {
    "kind": "switch",
    "values": [False, True],
    "default": False,
    "effects": [{"value": True, "memory_bytes": -20 * GIB, "memory_log_sd": 0.02}],
}
UNKNOWN = {"kind": "count", "values": [1, 2], "default": 1, "touches": ["host"]}


def campaign(**job: dict[str, Any]) -> CampaignSpec:
    """A mixture on four nodes, with knobs by their declarations."""
    fields = {
        "name": "mixture",
        "model": "qwen3-30b-a3b",
        "cluster": "h100-sxm",
        "budget": {"trials": 10},
        "space": {
            "global_batch_size": 256,
            "num_nodes": 4,
            "tp": [1, 2],
            "pp": [1, 2, 4],
            "ep": [1, 4, 8, 16],
            "micro_batch_size": [1, 2, 4],
            "zero_stage": [0, 1],
            "recompute": ["none", "full"],
            "precision": "bf16",
            "job": {name: {"search": each["values"], **each} for name, each in job.items()},
        },
    }
    return CampaignSpec.from_mapping(fields)


def plan_of(spec: CampaignSpec, **asked: Any) -> Plan:
    return make_plan(spec, top=20, **asked)


def text_of(plan: Plan) -> str:
    return "\n".join(plan_lines(plan, None))


def test_the_best_job_has_the_settings_that_help_and_not_those_that_harm() -> None:
    found = plan_of(campaign(dispatcher=PACKED, harmful=HARMFUL))
    best = found.layouts[0].layout
    assert best.ep > 1
    assert best.job == JobSettings({"dispatcher": "packed"})
    assert not any(each.layout.job.get("harmful") for each in found.layouts[:3])


def test_a_job_s_step_is_shorter_by_what_its_settings_save_of_what_is_exposed() -> None:
    spec = campaign(dispatcher=PACKED)
    best = plan_of(spec).layouts[0].layout
    predictions = LayoutPredictions(spec=spec)
    with_it, without = predictions.step(best), predictions.step(best.without_job)
    parts = {each.name: each.seconds for each in predictions.parts(best.without_job)}
    exchange = sum(seconds for name, seconds in parts.items() if name.startswith("exchange"))
    assert with_it.expected_s < without.expected_s
    assert without.expected_s - with_it.expected_s <= exchange
    shares = {each.name: each.seconds for each in predictions.parts(best)}
    assert shares["exchange_inside"] == pytest.approx(0.2 * parts["exchange_inside"])


def test_jobs_count_where_layouts_counted() -> None:
    spec = campaign(dispatcher=PACKED, harmful=HARMFUL)
    found = plan_of(spec)
    jobs = spec.jobs(spec.legal_set())
    assert found.num_jobs == len(jobs)
    assert found.num_legal < len(jobs)
    assert len({each.layout_key for each in found.layouts}) == 20
    assert sum(each.best_chance or 0.0 for each in found.layouts) <= 1.0 + 1e-9
    assert f"{len(jobs):,} jobs" in text_of(found)
    assert found.layouts[0].layout_key.endswith("~dispatcher.packed")


def test_a_plan_without_knobs_says_nothing_of_jobs() -> None:
    found = plan_of(campaign())
    assert (found.num_jobs, found.knobs) == (None, ())
    assert "job" not in text_of(found)


@pytest.fixture(scope="module")
def three_knobs() -> Plan:
    """A plan with a knob that helps, one that harms, and one of unknown effect."""
    return plan_of(campaign(dispatcher=PACKED, harmful=HARMFUL, streams=UNKNOWN))


def expected_of(plan: Plan) -> dict[str, KnobGain]:
    return {each.knob: each for each in plan.knobs}


def test_a_plan_has_the_gain_of_each_knob(three_knobs: Plan) -> None:
    gains = expected_of(three_knobs)
    assert set(gains) == {"dispatcher", "harmful", "streams"}
    assert gains["dispatcher"].step_ratio < 1.0 < gains["harmful"].step_ratio


def test_a_value_that_helps_is_chosen(three_knobs: Plan) -> None:
    packed = expected_of(three_knobs)["dispatcher"]
    assert (packed.value, packed.reference, packed.is_chosen) == ("packed", "plain", True)
    assert packed.step_ratio_low < packed.step_ratio < packed.step_ratio_high
    assert packed.helps > 0.9


def test_a_value_that_harms_is_not_chosen(three_knobs: Plan) -> None:
    harmful = expected_of(three_knobs)["harmful"]
    assert harmful.helps < 0.1
    assert not harmful.is_chosen


def test_a_value_of_unknown_effect_helps_as_likely_as_not(three_knobs: Plan) -> None:
    streams = expected_of(three_knobs)["streams"]
    assert (streams.step_ratio, streams.helps) == (pytest.approx(1.0), pytest.approx(0.5))


def test_a_plan_prints_how_sure_the_gain_of_a_value_is(three_knobs: Plan) -> None:
    text = " ".join(text_of(three_knobs).split())
    assert "with packed (chosen) as with plain (95 %: " in text


def test_what_a_value_brings_is_what_the_comparison_of_the_two_jobs_says() -> None:
    spec = campaign(dispatcher=PACKED)
    found = plan_of(spec)
    (gain,) = found.knobs
    best = found.layouts[0].layout
    compared = plan_of(spec, compare=(best.without_job.key, best.key)).comparison
    assert compared is not None
    ends = (gain.step_ratio_low, gain.step_ratio, gain.step_ratio_high)
    ratios = (compared.ratio_high, compared.ratio, compared.ratio_low)
    assert ends == pytest.approx([1.0 / each for each in ratios])
    assert gain.helps == pytest.approx(compared.second_is_better)


def test_a_knob_whose_condition_fails_in_the_best_layout_brings_nothing_there() -> None:
    best = plan_of(campaign(saves=SAVES)).layouts[0].layout
    slow = {**PACKED, "effects": [], "when": f"ep != {best.ep}"}
    planned = plan_of(campaign(dispatcher=slow))
    assert planned.layouts[0].layout.ep == best.ep
    assert planned.knobs == ()


def test_settings_that_save_memory_make_layouts_fit() -> None:
    spec = campaign(saves=SAVES)
    spec = replace(spec, cluster=replace(spec.cluster, device_memory_bytes=60 * GIB))
    found = plan_of(spec)
    (gain,) = found.knobs
    assert gain.peak_memory_bytes < -10 * GIB
    best = found.layouts[0]
    predictions = LayoutPredictions(spec=spec)
    assert best.layout.job == JobSettings({"saves": True})
    assert predictions.score(best.layout) > predictions.score(best.layout.without_job)


def test_measurements_of_other_campaigns_change_which_settings_are_best() -> None:
    spec = campaign(harmful={**HARMFUL, "effects": [], "touches": ["compute"]})
    layouts = [each.layout.without_job for each in plan_of(spec).layouts]
    measured = list(dict.fromkeys(layouts))[:6]
    predictions = LayoutPredictions(spec=spec)
    samples = [
        Sample(
            model=spec.model,
            cluster=spec.cluster,
            layout=replace(layout, job=settings),
            state="completed",
            step_time_s=predictions.step(layout).expected_s * factor,
        )
        for layout in measured
        for settings, factor in ((NO_SETTINGS, 1.0), (JobSettings({"harmful": True}), 0.75))
    ]
    found = plan_of(spec, knowledge=Knowledge(samples=tuple(samples)))
    assert found.layouts[0].layout.job == JobSettings({"harmful": True})
    (gain,) = found.knobs
    assert gain.step_ratio < 0.88
    assert gain.helps > 0.95


def test_two_jobs_are_compared_with_the_settings_in_which_they_differ() -> None:
    spec = campaign(dispatcher=PACKED)
    best = plan_of(spec).layouts[0].layout
    found = plan_of(spec, compare=(best.without_job.key, best.key)).comparison
    assert found is not None
    (change,) = found.changes
    assert (change.knob, change.first, change.second) == ("dispatcher", "plain", "packed")
    assert found.ratio > 1.0
    assert "job knobs" in {each.part for each in found.uncertain}


def test_a_setting_that_the_campaign_does_not_search_is_not_compared() -> None:
    spec = campaign(dispatcher=PACKED)
    best = plan_of(spec).layouts[0].layout
    with pytest.raises(LayoutInvalidError, match="not among the settings"):
        plan_of(spec, compare=("1", f"{best.without_job.key}~foreign.true"))


def test_a_baseline_with_settings_has_its_rank_among_the_jobs() -> None:
    spec = campaign(dispatcher=PACKED)
    fifth = plan_of(spec).layouts[4].layout
    found = plan_of(replace(spec, baseline=fifth)).baseline
    assert found is not None
    assert (found.planned.rank, found.is_outside) == (5, False)


def test_another_trainer_has_not_the_campaign_s_knobs() -> None:
    spec = campaign(dispatcher=PACKED)
    best = plan_of(spec).layouts[0].layout
    found = plan_of(replace(spec, baseline=best), software="torchtitan")
    assert found.baseline is not None
    assert found.baseline.planned.layout == best.without_job
    assert (found.num_jobs, found.knobs) == (None, ())
    sentence = "the job knobs are those of embedded, and are left out for torchtitan"
    assert sentence in found.warnings
    assert sentence not in " ".join(plan_of(spec).warnings)
    predictions = LayoutPredictions(spec=spec, software="torchtitan")
    with_it, without = predictions.step(best), predictions.step(best.without_job)
    assert with_it.expected_s == pytest.approx(without.expected_s)
    with pytest.raises(LayoutInvalidError, match="not among the settings"):
        plan_of(spec, software="torchtitan", compare=("1", best.key))


@pytest.mark.parametrize("most", [100, 200])
def test_the_best_jobs_are_found_without_ranking_all_of_them(most: int) -> None:
    """Settings that lift layouts far behind: ep costs much, and packing saves most of that."""
    spec = campaign(dispatcher=PACKED, harmful=HARMFUL, streams=UNKNOWN)
    predictions, legal = LayoutPredictions(spec=spec), spec.legal_set()
    jobs, ranked = spec.jobs(legal), predictions.rank(legal)
    assert isinstance(jobs, JobSet)
    assert len(jobs) > 4 * most
    every = rank_jobs(predictions, jobs, ranked)
    assert len(every.order) == len(jobs)
    few = rank_jobs(predictions, jobs, ranked, most)
    assert len(few.order) <= 1.1 * most
    assert few.order[0] == every.order[0]
    assert few.score[:3] == pytest.approx(every.score[:3], abs=0.02)


def test_all_jobs_are_ranked_by_what_is_predicted_of_each() -> None:
    spec = campaign(dispatcher=PACKED, saves=SAVES)
    predictions, legal = LayoutPredictions(spec=spec), spec.legal_set()
    jobs = spec.jobs(legal)
    assert isinstance(jobs, JobSet)
    found = rank_jobs(predictions, jobs, predictions.rank(legal))
    assert sorted(found.order.tolist()) == list(range(len(jobs)))
    for place in (0, 7, len(jobs) // 2, len(jobs) - 1):
        job = jobs.layout(int(found.order[place]))
        assert found.score[place] == pytest.approx(predictions.score(job), abs=1e-6)
        assert found.step_time_s[place] == pytest.approx(predictions.step(job).expected_s)
    assert (np.diff(found.score) <= 0).all()
