"""What measurements teach about the values of job knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from layout_tuner.array_types import Bools, Floats
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import StepFactors
from layout_tuner.predictions.belief.job_knobs.knob_step_time import (
    NUM_STEP_FACTORS,
    TERMS_OF,
    JobRows,
    KnobFactors,
    KnobValue,
    KnownKnobs,
)
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.known_residuals import known_residual
from layout_tuner.predictions.belief.residual import KnobPoints, knob_coordinates
from layout_tuner.predictions.belief.step_belief import StepBelief, StepModel, joined
from layout_tuner.predictions.belief.time_evidence import Origin
from layout_tuner.predictions.belief.time_fit import TIME_PRIOR
from layout_tuner.predictions.estimates.step_time import PRIOR, TERM_NAMES, step_time_s, time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.jobs.condition import Condition
from layout_tuner.search_spaces.jobs.job_choices import JobChoices
from layout_tuner.search_spaces.jobs.job_knob import TOUCHED, JobKnob, KnobEffect, Touched
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.trainers.registry import knobs_of_software

H100 = CLUSTER_PRESETS["h100-sxm"]
MIXTURE = model_preset("qwen3-30b-a3b")
TRAINER = "some-trainer"
KERNELS = kernels_of(TRAINER, H100)
DISPATCHER = JobKnob(
    name="dispatcher",
    kind="word",
    values=("plain", "packed"),
    default="plain",
    when=Condition.read("ep > 1"),
    touches=("ep",),
)
PACKED = JobSettings({"dispatcher": "packed"})
KNOWN = KnownKnobs(software=TRAINER, knobs={"dispatcher": DISPATCHER})
SPACE = {
    "global_batch_size": 256,
    "num_nodes": 4,
    "tp": [1, 2],
    "pp": [1, 2],
    "ep": [1, 4, 8, 16],
    "micro_batch_size": [1, 2, 4],
    "zero_stage": [0, 1],
    "recompute": "none",
    "precision": "bf16",
}
SET = CampaignSpec.from_mapping(
    {
        "name": "knobs",
        "model": "qwen3-30b-a3b",
        "cluster": "h100-sxm",
        "budget": {"trials": 10},
        "space": SPACE,
    }
).legal_set()
LAYOUTS = [SET.layout(place) for place in range(len(SET))]
WITH_EP = [layout for layout in LAYOUTS if layout.ep > 1]
MEASURED, UNMEASURED = WITH_EP[::12][:4], WITH_EP[5::12]
EXCHANGE = [TERM_NAMES.index(name) for name in TERMS_OF["ep"]]


def packed(layouts: Sequence[Layout]) -> list[Layout]:
    return [replace(layout, job=PACKED) for layout in layouts]


def true_step_s(layouts: Sequence[Layout], factor: float = 0.7) -> Floats:
    """Step times of a machine on which packing takes so many times as long on what ep costs."""
    seconds = np.empty(len(layouts))
    for place, layout in enumerate(layouts):
        factors = PRIOR.copy()
        factors[EXCHANGE] *= factor if layout.job else 1.0
        seconds[place] = step_time_s(layout.without_job, MIXTURE, H100, factors, KERNELS)[0]
    return seconds


def samples(
    layouts: Sequence[Layout], *, software: str = TRAINER, factor: float = 0.7
) -> list[Sample]:
    return [
        Sample(
            model=MIXTURE,
            cluster=H100,
            layout=layout,
            state="completed",
            step_time_s=step_s,
            software=software,
        )
        for layout, step_s in zip(layouts, true_step_s(layouts, factor).tolist(), strict=True)
    ]


def predicted(
    calibration: TimeCalibration, layouts: Sequence[Layout], software: str = TRAINER
) -> tuple[Floats, Floats]:
    columns = LayoutColumns.of_each(layouts)
    return calibration.predict(columns, MIXTURE, H100, software=software)


def gain(
    calibration: TimeCalibration, layouts: Sequence[Layout], software: str = TRAINER
) -> Floats:
    """Logarithm of the predicted steps with packing over those without."""
    with_it, _ = predicted(calibration, packed(layouts), software)
    return with_it - predicted(calibration, layouts, software)[0]


def true_gain(layouts: Sequence[Layout]) -> Floats:
    return np.log(true_step_s(packed(layouts)) / true_step_s(layouts))


COLD = TimeCalibration.fit(known=KNOWN)
PAIRS = [*samples(MEASURED), *samples(packed(MEASURED))]
LEARNT = COLD.updated(PAIRS, campaign="this")


def test_a_knob_s_effect_is_learnt_on_jobs_that_were_not_measured() -> None:
    assert np.abs(gain(COLD, UNMEASURED)).max() < 1e-12
    # Four pairs, each about as far off as its gain is large, move a prior of 15 % half the way.
    of_each = gain(LEARNT, UNMEASURED) / true_gain(UNMEASURED)
    assert of_each.min() > 0.4
    assert of_each.max() < 1.2


def test_a_knob_changes_what_is_exposed_of_its_terms_and_not_the_step() -> None:
    exposed = -true_gain(UNMEASURED)
    assert exposed.max() > 3 * exposed.min()
    found = -gain(LEARNT, UNMEASURED)
    assert np.corrcoef(found, exposed)[0, 1] > 0.98


def test_layouts_without_the_terms_that_it_touches_are_predicted_as_without_it() -> None:
    without = [layout for layout in LAYOUTS if layout.ep == 1]
    assert np.abs(gain(LEARNT, without)).max() < 1e-9


def test_measurements_make_a_knob_s_effect_surer() -> None:
    deviations = [
        each.factors(MIXTURE, H100, num_devices=32, software=TRAINER, campaign="this")
        for each in (COLD, LEARNT)
    ]
    before, after = (np.sqrt(each.covariance[-1, -1]) for each in deviations)
    assert before == pytest.approx(np.log(1.15))
    assert after < 0.7 * before


def test_the_next_campaign_of_the_same_trainer_profits() -> None:
    elsewhere = TimeCalibration.fit(PAIRS, known=KNOWN)
    assert (gain(elsewhere, UNMEASURED) / true_gain(UNMEASURED)).min() > 0.4


def test_another_trainer_does_not_profit_from_a_knob_of_the_same_name() -> None:
    other = KnownKnobs(software="other-trainer", knobs=KNOWN.knobs)
    elsewhere = TimeCalibration.fit(PAIRS, known=other)
    found = gain(elsewhere, UNMEASURED, "other-trainer")
    assert np.abs(found).max() < 0.05 * np.abs(true_gain(UNMEASURED)).max()


def test_the_settings_of_measured_jobs_do_not_bend_the_factors_of_layouts() -> None:
    """A declared knob explains what its jobs gain; the factors of ep stay."""
    places = [*EXCHANGE]

    def mean(known: KnownKnobs, layouts: Sequence[Layout]) -> Floats:
        found = TimeCalibration.fit(known=known).updated(samples(layouts), campaign="this")
        return found.factors(MIXTURE, H100, num_devices=32, software=TRAINER, campaign="this").mean

    plain = mean(KNOWN, MEASURED)[places]
    every = [*MEASURED, *packed(MEASURED)]
    bent = [
        np.abs(mean(known, every)[places] - plain).max() for known in (KNOWN, touching("optimizer"))
    ]
    assert bent[0] < 0.8 * bent[1]


def test_a_stated_effect_is_believed_before_any_measurement() -> None:
    effect = KnobEffect(factor=0.7, log_sd=0.1, source="a table")
    stated = replace(DISPATCHER, effects={"packed": effect})
    known = KnownKnobs(software=TRAINER, knobs={"dispatcher": stated})
    cold = TimeCalibration.fit(known=known)
    assert gain(cold, UNMEASURED) == pytest.approx(true_gain(UNMEASURED))


def test_a_knob_of_which_nothing_is_known_has_no_effect_and_15_percent_on_the_step() -> None:
    layouts = [replace(layout, job=JobSettings({"mystery": True})) for layout in UNMEASURED]
    mean, log_sd = predicted(COLD, layouts)
    plain_mean, plain_sd = predicted(COLD, UNMEASURED)
    assert mean == pytest.approx(plain_mean)
    added = np.sqrt(np.square(log_sd) - np.square(plain_sd))
    assert added == pytest.approx(np.full(len(layouts), np.log(1.15)))


def test_a_knob_that_touches_memory_alone_changes_no_step() -> None:
    knob = replace(DISPATCHER, touches=(), effects={"packed": KnobEffect(memory_bytes=1e9)})
    cold = TimeCalibration.fit(known=KnownKnobs(software=TRAINER, knobs={"dispatcher": knob}))
    assert gain(cold, UNMEASURED) == pytest.approx(0.0)
    spread = predicted(cold, packed(UNMEASURED))[1]
    assert spread == pytest.approx(predicted(cold, UNMEASURED)[1])


def test_true_and_1_are_different_values() -> None:
    values = [*KnobValue.of("", JobSettings({"a": True})), *KnobValue.of("", JobSettings({"a": 1}))]
    knobs = KnobFactors.of(values, KnownKnobs())
    assert len(knobs) == 2
    assert knobs.design("", [JobSettings({"a": 1})]).tolist() == [[0.0, 1.0]]


def test_every_group_of_terms_has_terms_and_no_term_is_in_two() -> None:
    assert set(TERMS_OF) == set(TOUCHED)
    every = [name for names in TERMS_OF.values() for name in names]
    assert len(every) == len(set(every))
    assert set(every) <= set(TERM_NAMES)


# A search's own belief, whose residual holds what is special to one layout.

CHOICES = JobChoices.of({"dispatcher": ["plain", "packed"]}, KNOWN.knobs, TRAINER)
JOBS = JobSet(SET, CHOICES, MIXTURE, H100)
FACTORS = COLD.factors(MIXTURE, H100, num_devices=32, software=TRAINER)


def lazy_model() -> StepModel:
    """The layouts alone, and their jobs by position."""
    columns = SET.columns()
    return StepModel(
        terms=time_terms(columns, MIXTURE, H100, kernels=KERNELS),
        points=KnobPoints(columns),
        residual=np.zeros(len(SET)),
        of_jobs=JobRows(JOBS, COLD.knobs, TRAINER),
    )


def whole_model() -> StepModel:
    """All jobs."""
    columns = JOBS.columns()
    factors, settings = COLD.with_settings(FACTORS, columns, TRAINER)
    assert isinstance(factors, StepFactors)
    return StepModel(
        terms=time_terms(columns, MIXTURE, H100, kernels=KERNELS),
        points=KnobPoints(columns),
        residual=np.zeros(len(JOBS)),
        settings=settings,
    )


def jobs_at(layouts: Sequence[Layout]) -> NDArray[np.int64]:
    return np.array([JOBS.index_of(layout) for layout in layouts])


def believe(model: StepModel, *, interaction_log_sd: float = 0.0) -> StepBelief:
    """The belief after the measured jobs, whose steps have no interaction with tp."""
    measured, factors = [*MEASURED, *packed(MEASURED)], FACTORS
    if model.of_jobs is not None:
        interactions = model.of_jobs.interactions
        log_sd = np.full(len(interactions), interaction_log_sd)
        factors = factors.with_knobs(replace(interactions, log_sd=log_sd))
    return StepBelief(model, factors, jobs_at(measured), np.log(true_step_s(measured)))


def test_a_search_learns_a_knob_from_jobs_and_predicts_the_others() -> None:
    belief = believe(lazy_model())
    with_it, without = jobs_at(packed(UNMEASURED)), jobs_at(UNMEASURED)
    found = belief.marginals(with_it)[0] - belief.marginals(without)[0]
    assert (found / true_gain(UNMEASURED)).min() > 0.5
    assert (found / true_gain(UNMEASURED)).max() < 1.4


def test_a_value_measured_at_tp_1_alone_is_less_sure_where_tp_is_above() -> None:
    """There the value may do something else."""
    dense = CampaignSpec.from_mapping(
        {
            "name": "dense",
            "model": "gpt-22b",
            "cluster": "h100-sxm",
            "budget": {"trials": 10},
            "space": {**SPACE, "num_nodes": 2, "tp": [1, 2], "pp": [4, 8], "ep": 1},
        }
    )
    legal, kernel = dense.legal_set(), replace(DISPATCHER, when=None, touches=("compute",))
    known = KnownKnobs(software=TRAINER, knobs={"dispatcher": kernel})
    knobs = TimeCalibration.fit(known=known).knobs
    choices = JobChoices.of({"dispatcher": ["plain", "packed"]}, known.knobs, TRAINER)
    jobs = JobSet(legal, choices, dense.model, H100)
    columns, every = legal.columns(), np.arange(len(jobs))
    model = StepModel(
        terms=time_terms(columns, dense.model, H100, kernels=KERNELS),
        points=KnobPoints(columns),
        residual=np.zeros(len(legal)),
        of_jobs=(rows := JobRows(jobs, knobs, TRAINER)),
    )
    has_tp = jobs.column("tp", every) > 1
    is_packed = np.array([bool(jobs.layout(at).job) for at in range(len(jobs))])
    measured = np.flatnonzero(~has_tp)

    def spread(interaction_log_sd: float, asked: Bools) -> float:
        log_sd = np.full(len(rows.interactions), interaction_log_sd)
        prior = TIME_PRIOR.factors.with_knobs(knobs)
        prior = prior.with_knobs(replace(rows.interactions, log_sd=log_sd))
        belief = StepBelief(model, prior, measured, model.rows(measured).log_s(prior.mean))
        return float(belief.marginals(np.flatnonzero(asked))[1].mean())

    with_tp, without_tp = is_packed & has_tp, is_packed & ~has_tp
    assert spread(0.25, with_tp) > 1.2 * spread(0.0, with_tp)
    assert spread(0.25, without_tp) == pytest.approx(spread(0.0, without_tp), rel=0.05)


def test_jobs_are_predicted_alike_from_layouts_with_settings_and_from_all_jobs() -> None:
    rows = np.arange(len(JOBS))
    lazy, whole = believe(lazy_model()), believe(whole_model())
    for one, other in zip(lazy.marginals(rows), whole.marginals(rows), strict=True):
        assert one == pytest.approx(other)
    assert lazy.physical_mean(rows) == pytest.approx(whole.physical_mean(rows))
    assert lazy.physical_deviation(rows) == pytest.approx(whole.physical_deviation(rows))
    # Lazy rows have factors more, which is why the same numbers make other draws.
    drawn = [each.draws(rows[:40], 4000, np.random.default_rng(0)) for each in (lazy, whole)]
    assert drawn[0].mean(axis=0) == pytest.approx(drawn[1].mean(axis=0), abs=0.02)
    assert drawn[0].std(axis=0) == pytest.approx(drawn[1].std(axis=0), rel=0.1)


def test_draws_of_jobs_have_the_mean_of_their_prediction() -> None:
    belief, rows = believe(lazy_model()), jobs_at([*UNMEASURED[:5], *packed(UNMEASURED[:5])])
    drawn = belief.draws(rows, 4000, np.random.default_rng(1))
    mean, deviation = belief.marginals(rows)
    assert drawn.mean(axis=0) == pytest.approx(mean, abs=0.06)
    assert drawn.std(axis=0) == pytest.approx(deviation, rel=0.25)


def test_the_residual_of_one_job_says_more_of_its_layout_than_of_others_with_the_knob() -> None:
    """Packing may gain a few percent more or less on one layout than on the others."""
    one, far = UNMEASURED[0], UNMEASURED[-1]
    points = knob_coordinates(LayoutColumns.of_each([one, *packed([one, far])]))
    assert np.linalg.norm(points[0] - points[1]) == pytest.approx(0.1)
    assert np.linalg.norm(points[1] - points[2]) > 1.0


def test_models_of_a_search_keep_their_settings_when_they_are_joined() -> None:
    model, rows = lazy_model(), jobs_at([*MEASURED, *packed(MEASURED)])
    both = joined([model.rows(rows[:3]), model.rows(rows[3:])])
    deviations = np.zeros(NUM_STEP_FACTORS + 1)
    deviations[-1] = np.log(0.7)
    assert np.exp(both.log_s(deviations)) == pytest.approx(
        true_step_s([*MEASURED, *packed(MEASURED)])
    )


def test_residuals_from_elsewhere_are_those_beside_the_knobs() -> None:
    origin = Origin(
        cluster=H100.name, software=TRAINER, model=MIXTURE, num_devices=32, campaign="next"
    )
    pairs = [*samples(MEASURED), *samples(packed(MEASURED), factor=0.85)]
    known = TimeCalibration.fit(pairs, known=KNOWN)
    unknown = TimeCalibration.fit(pairs, known=touching("optimizer"))
    columns = LayoutColumns.of_each(packed(MEASURED))
    off = [np.abs(known_residual(each, origin, columns)).max() for each in (known, unknown)]
    assert off[0] < 0.7 * off[1]


def touching(group: Touched) -> KnownKnobs:
    """The knob as one that touches other terms."""
    return KnownKnobs(software=TRAINER, knobs={"dispatcher": replace(DISPATCHER, touches=(group,))})


def test_jobs_without_settings_are_those_of_their_layouts() -> None:
    assert JOBS.layout(0).job == NO_SETTINGS
    rows = jobs_at(LAYOUTS)
    plain = replace(lazy_model(), of_jobs=None).rows(np.arange(len(SET)))
    assert lazy_model().rows(rows).log_s(FACTORS.mean) == pytest.approx(plain.log_s(FACTORS.mean))


@pytest.mark.parametrize(
    ("software", "adapter"),
    [
        ("Megatron-LM core_v0.12", "megatron-lm"),
        ("torchtitan 0.2", "torchtitan"),
        ("megatron-bridge 26.02", "megatron-bridge"),
        ("", "embedded"),
    ],
)
def test_a_trainer_of_some_version_has_its_catalogue(software: str, adapter: str) -> None:
    catalogue = knobs_of_software(adapter)
    assert catalogue
    for name, knob in catalogue.items():
        assert KNOWN.declared(software, name) == knob
