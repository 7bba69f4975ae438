"""Searches of jobs: layouts with the settings of the trainer's own knobs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from ConfigSpace.util import deactivate_inactive_hyperparameters
from deephyper.hpo import HpProblem

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.observation import FAILED, Observation
from layout_tuner.search_spaces.campaigns.fidelity import ProbeCosts
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.jobs.condition import Condition, Facts
from layout_tuner.search_spaces.jobs.job_choices import JobChoices
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal
from layout_tuner.tuner.strategies.ask_and_tell import History, LayoutSearch
from layout_tuner.tuner.strategies.deephyper import KnobRanks
from layout_tuner.tuner.strategies.guided import GuidedProposer
from layout_tuner.tuner.strategies.predictions import MOST_COMPARED, Predictions, order_by_estimate
from layout_tuner.tuner.strategies.registry import STRATEGIES, make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem

MODEL, CLUSTER = MODEL_PRESETS["gpt-1.3b"], CLUSTER_PRESETS["frontier"]
KNOBS = {
    "compile": JobKnob(name="compile", kind="switch", values=(False, True), default=False),
    "async_tp": JobKnob(
        name="async_tp",
        kind="switch",
        values=(False, True),
        default=False,
        when=Condition.read("tp > 1 and compile"),
        touches=("tp",),
    ),
    "bucket": JobKnob(
        name="bucket",
        kind="count",
        values=(1, 4, 16),
        default=4,
        when=Condition.read("not (dp < 4 or zero_stage == 1)"),
        touches=("dp",),
    ),
}
ALL = {"compile": [False, True], "async_tp": [False, True], "bucket": [1, 4, 16]}


def make_jobs(
    searched: Mapping[str, Any] = ALL, knobs: Mapping[str, JobKnob] = KNOBS, **space: Any
) -> JobSet:
    values = {
        "global_batch_size": 64,
        "num_nodes": 1,
        "tp": [1, 2, 4],
        "pp": [1, 2],
        "zero_stage": [0, 1],
        "micro_batch_size": [1, 2],
        "precision": "bf16",
    }
    legal = enumerate_legal(SearchSpace(**values | space), MODEL, CLUSTER)
    return JobSet(legal, JobChoices.of(searched, knobs, "a trainer"), MODEL, CLUSTER)


def make_problem(jobs: JobSet, **changes: Any) -> SearchProblem:
    return SearchProblem(layouts=jobs, model=MODEL, cluster=CLUSTER, **changes)


def measure(job: Layout) -> Observation:
    """Compilation saves a fifth, and an asynchronous tp as much again; a large bucket costs."""
    step_s = 1.0 + 0.1 * job.tp + 0.2 * job.pp + 0.3 / job.micro_batch_size
    step_s *= 0.8 if job.job.get("compile") else 1.0
    step_s *= 0.8 if job.job.get("async_tp") else 1.0
    step_s *= 1.1 if job.job.get("bucket") == 16 else 1.0
    return Observation.completed(1000.0 / step_s, step_time_s=step_s)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
class TestEveryStrategy:
    def test_asks_for_every_job_once_and_for_no_setting_that_a_layout_cannot_have(
        self, name: str
    ) -> None:
        jobs = make_jobs(pp=1, micro_batch_size=1, zero_stage=0, tp=[1, 2])
        assert len(jobs.legal) < len(jobs) < 12 * len(jobs.legal)
        search, asked = make_strategy(name, make_problem(jobs), seed=3), []
        while (job := search.ask()) is not None:
            asked.append(job)
            search.tell(job, measure(job))
        first = list(dict.fromkeys(asked))
        assert len(first) == len(jobs)
        assert name == "guided" or len(asked) == len(jobs)
        assert {each.key for each in first} == {jobs.layout(i).key for i in range(len(jobs))}

    def test_rebuilt_it_goes_on_as_if_never_killed(self, name: str) -> None:
        jobs = make_jobs()
        search = make_strategy(name, make_problem(jobs), seed=4)
        told = []
        for number in range(14):
            job = search.ask()
            assert job is not None
            told.append((job, FAILED if number == 5 else measure(job)))
            search.tell(*told[-1])
        pending = search.ask()
        rebuilt = make_strategy(name, make_problem(jobs), seed=4)
        for job, observation in told:
            rebuilt.tell(job, observation)
        rebuilt.resume(pending)
        assert [rebuilt.ask() for _ in range(2)] == [search.ask() for _ in range(2)]


def test_random_draws_jobs_alike_and_holds_those_alone_that_it_drew() -> None:
    knobs = {
        name: JobKnob(name=name, kind="switch", values=(False, True), default=False)
        for name in map("knob_{}".format, range(10))
    }
    searched = {name: [False, True] for name in knobs}
    jobs = make_jobs(searched, knobs, micro_batch_size={"from": 1, "to": 64})
    assert len(jobs) > 50_000
    tracemalloc.start()
    search = make_strategy("random", make_problem(jobs), seed=0)
    drawn = [search.ask() for _ in range(400)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 8 * len(jobs), "a number for each job"
    assert len(set(drawn)) == 400
    share = np.mean([job is not None and job.job.get("knob_3", False) for job in drawn])
    assert 0.4 < share < 0.6


class TestDeepHyper:
    @pytest.mark.parametrize(
        "when",
        [
            "tp > 1",
            "tp >= 2 and not compile",
            "not (tp == 2 or pp > 1)",
            "zero_stage in [1] or (compile and micro_batch_size < 2)",
            "tp <= 3 and num_layers > 2",
            "device == mi250x and pp != 1",
            "attention == own and tp > 1",
            "attention not in [own, fused] or compile",
            "tp > 100 or compile",
        ],
    )
    def test_a_hyperparameter_is_active_where_the_condition_of_its_knob_holds(
        self, when: str
    ) -> None:
        knobs = {
            "compile": KNOBS["compile"],
            "attention": JobKnob(
                name="attention", kind="word", values=("own", "fused", "math"), default="own"
            ),
            "asked": JobKnob(
                name="asked",
                kind="word",
                values=("low", "high"),
                default="low",
                when=Condition.read(when),
            ),
        }
        searched = {
            "compile": [False, True],
            "attention": ["fused", "own", "math"],
            "asked": ["low", "high"],
        }
        jobs = make_jobs(searched, knobs)
        ranks = KnobRanks(jobs)
        problem = HpProblem()
        parameters = {
            name: problem.add_hyperparameter(list(range(count)), name)
            for name, count in zip(ranks.names, ranks.num_values, strict=True)
        }
        assert set(ranks.conditions) == {"asked"}
        problem.add_condition(ranks.conditions["asked"].of(parameters["asked"], parameters))
        rows = ranks.rows(np.arange(len(jobs)))
        seen = set()
        for place in range(len(jobs)):
            job = jobs.layout(place)
            point = dict(zip(ranks.names, rows[place].tolist(), strict=True))
            active = "asked" in dict(deactivate_inactive_hyperparameters(point, problem.space))
            settings = {"compile": False, "attention": "own", **job.job}
            columns = jobs.columns(np.array([place]))
            holds = knobs["asked"].when.holds(Facts(columns, MODEL, CLUSTER, settings))  # type: ignore[union-attr]
            assert active == bool(np.all(holds)), job.key
            seen.add(active)
        assert seen == {True, False}

    @pytest.mark.parametrize("when", ["tp > pp", "dp_cp > 2", "conditional == false and tp > 1"])
    def test_what_configspace_cannot_say_is_left_without_a_condition(self, when: str) -> None:
        knobs = {
            "conditional": JobKnob(
                name="conditional",
                kind="switch",
                values=(False, True),
                default=False,
                when=Condition.read("pp > 1"),
            ),
            "asked": JobKnob(
                name="asked",
                kind="switch",
                values=(False, True),
                default=False,
                when=Condition.read(when),
            ),
        }
        jobs = make_jobs({name: [False, True] for name in knobs}, knobs)
        assert set(KnobRanks(jobs).conditions) == {"conditional"}
        search = make_strategy("deephyper", make_problem(jobs), seed=0)
        ask_some(search, 16)

    def test_candidates_are_told_apart_by_all_knobs(self) -> None:
        jobs = make_jobs()
        rows = KnobRanks(jobs).rows(np.arange(len(jobs)))
        assert len(np.unique(rows, axis=0)) == len(jobs)

    def test_it_learns_which_settings_are_fast(self) -> None:
        jobs = make_jobs()
        every = [jobs.layout(place) for place in range(len(jobs))]
        fast = np.mean([bool(job.job.get("async_tp")) for job in every])
        asked = []
        for seed in range(2):
            asked += ask_some(make_strategy("deephyper", make_problem(jobs), seed=seed), 26)[10:]
        assert np.mean([bool(job.job.get("async_tp")) for job in asked]) > 2 * fast


def ask_some(search: LayoutSearch, number: int) -> list[Layout]:
    asked = []
    for _ in range(number):
        job = search.ask()
        assert job is not None
        search.tell(job, measure(job))
        asked.append(job)
    return asked


def test_guided_tries_a_setting_whose_published_effect_has_the_wrong_sign() -> None:
    knobs = {
        "kernel": JobKnob(
            name="kernel",
            kind="word",
            values=("own", "packed"),
            default="own",
            touches=("compute",),
            effects={"packed": KnobEffect(factor=1.6)},
        )
    }
    jobs = make_jobs({"kernel": ["own", "packed"]}, knobs, micro_batch_size=[1, 2, 4, 8])

    def outcome(job: Layout) -> Observation:
        step_s = (1.0 + 0.05 * job.tp) * (0.6 if job.job else 1.0)
        return Observation.completed(1000.0 / step_s, step_time_s=step_s)

    search = make_strategy("guided", make_problem(jobs), seed=0)
    asked = []
    for _ in range(12):
        job = search.ask()
        assert job is not None
        asked.append(job)
        search.tell(job, outcome(job))
    assert any(job.job for job in asked[:10])
    assert asked[-1].job, "it is learnt from the first that is measured"


def test_a_proposal_looks_at_the_jobs_of_some_layouts_alone() -> None:
    """Otherwise 64 settings of a million layouts would take 64 times as long as none."""
    knobs = {
        name: JobKnob(
            name=name, kind="switch", values=(False, True), default=False, touches=("compute",)
        )
        for name in map("knob_{}".format, range(9))
    }
    searched = {name: [False, True] for name in knobs}
    jobs = make_jobs(searched, knobs, micro_batch_size={"from": 1, "to": 64}, num_nodes=[1, 2, 4])
    problem = make_problem(jobs)
    predictions = Predictions(problem)
    history = History(jobs)
    belief = predictions.belief(history)
    of_all = predictions.of_layouts(history, belief)
    worth = of_all.values[:, 0] + np.log(of_all.fitting.probability)
    best = int(worth.argmax())
    looked = predictions.jobs_to_look_at(history, belief, of_all, first_alone)
    assert len(jobs) > 10 * MOST_COMPARED
    assert 0 < len(looked) <= MOST_COMPARED
    assert best in jobs.layout_rows(looked)
    for index in jobs.jobs_of(np.array([best])).tolist():
        history.take(index)
    looked = predictions.jobs_to_look_at(history, belief, of_all, first_alone)
    assert best not in jobs.layout_rows(looked)


def first_alone(values: Floats) -> Floats:
    return np.asarray(values[..., 0])


def switches(number: int, **others: JobKnob) -> tuple[dict[str, list[bool]], dict[str, JobKnob]]:
    """What is searched, and the knobs: others, and so many that touch computation."""
    names = map("switch_{}".format, range(number))
    knobs = {
        name: JobKnob(
            name=name, kind="switch", values=(False, True), default=False, touches=("compute",)
        )
        for name in names
    } | others
    return {name: [False, True] for name in knobs}, knobs


def test_the_order_by_estimates_has_every_job_once() -> None:
    """Of most layouts, some jobs are among the best and others are not."""
    jobs = make_jobs(*switches(6), micro_batch_size=[1, 2, 4, 8], num_nodes=[1, 2])
    assert len(jobs) > MOST_COMPARED
    order = list(order_by_estimate(make_problem(jobs)))
    assert len(order) == len(jobs)
    assert sorted(order) == list(range(len(jobs)))


def test_a_budget_keeps_what_the_shortest_job_of_all_takes_also_one_that_is_not_looked_at() -> None:
    jobs = make_jobs(*switches(6), micro_batch_size=[1, 2, 4, 8], num_nodes=[1, 2, 4])
    proposer = GuidedProposer(make_problem(jobs, costs=ProbeCosts()), seed=0)
    history, every = History(jobs), np.arange(len(jobs))
    belief = proposer._predictions.belief(history)
    assert proposer._cheap is not None
    least = proposer._cheap.least_full_node_s(every, belief.physical_mean(every))
    assert proposer._least_full_node_s(history, belief) == pytest.approx(least, rel=1e-3)


class TestJobsThatFitWithASettingAlone:
    SAVER = JobKnob(
        name="saver",
        kind="switch",
        values=(False, True),
        default=False,
        effects={True: KnobEffect(touches=("compute",), factor=1.3, memory_factor=0.3)},
    )

    def make_problem(self, **changes: Any) -> SearchProblem:
        model, cluster = MODEL_PRESETS["llama-70b"], CLUSTER_PRESETS["h100-sxm"]
        searched, knobs = switches(6, saver=self.SAVER)
        space = SearchSpace(
            global_batch_size=64,
            num_nodes=2,
            tp=[2, 4, 8],
            pp=[1, 2],
            zero_stage=[0, 1],
            micro_batch_size=[2, 4],
            recompute=["none", "full"],
            precision="bf16",
        )
        legal = enumerate_legal(space, model, cluster)
        jobs = JobSet(legal, JobChoices.of(searched, knobs, "a trainer"), model, cluster)
        return SearchProblem(layouts=jobs, model=model, cluster=cluster, **changes)

    def look(self, figure: Callable[[Floats], Floats], **changes: Any) -> tuple[Ints, Floats]:
        """The jobs that are looked at, and P(fits) of all jobs."""
        problem = self.make_problem(**changes)
        predictions, history = Predictions(problem), History(problem.layouts)
        belief = predictions.belief(history)
        of_all = predictions.of_layouts(history, belief)
        every = np.arange(len(problem.layouts))
        looked = predictions.jobs_to_look_at(history, belief, of_all, figure)
        return looked, predictions.fitting.predict(history, every).probability

    def test_they_are_looked_at(self) -> None:
        looked, fits = self.look(first_alone)
        places = np.flatnonzero(fits > 0.5)
        assert 0 < len(places) < MOST_COMPARED // 2 < len(fits) // 2
        assert np.isin(places, looked).mean() > 0.9

    def test_another_objective_is_that_of_their_settings(self) -> None:
        """The headroom of a layout does not grow with the speed of its settings."""
        both = ("tokens_per_s", "memory_headroom")
        looked, _ = self.look(lambda values: values[..., 1], objectives=both)
        problem = self.make_problem()
        settings = (problem.layouts.layout(place).job for place in looked.tolist())
        assert np.mean([bool(each.get("saver")) for each in settings]) > 0.9
