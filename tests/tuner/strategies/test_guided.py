"""What the guided search is worth, what keeps it from wasting probes, and what is left to gain."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.observation import FAILED, INFEASIBLE, Observation
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.belief.residual import COORDINATE_KNOBS, knob_coordinates
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.predictions.estimates.step_time import PRIOR, TERM_NAMES, time_terms
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.objectives import pareto_front
from layout_tuner.tuner.strategies.ask_and_tell import History, LayoutSearch
from layout_tuner.tuner.strategies.fitting import HERE, FittingBelief
from layout_tuner.tuner.strategies.guided import GuidedProposer
from layout_tuner.tuner.strategies.improvement import hypervolume, soft_gains
from layout_tuner.tuner.strategies.predictions import Predictions
from layout_tuner.tuner.strategies.registry import make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from layout_tuner.units import GIB
from tests.tuner.factories import make_spec
from tests.tuner.search_problems import ListedLayouts, make_cluster, make_problem
from tests.tuner.strategies.test_strategies import make_layouts

Judge = Callable[[int], Observation]


def make_search(memory_gib: float = 40.0, **changes: object) -> SearchProblem:
    layouts = make_layouts(devices=32, micro_batch_sizes=(1, 2, 4))
    cluster = make_cluster(device_memory_bytes=int(memory_gib * GIB))
    return make_problem(layouts, cluster=cluster, **changes)


def make_truth(problem: SearchProblem, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Step times with every term wrong by about a half, and a wave in no term; peaks 10 % up.

    Knobs and terms that no problem here has, as those of experts, take no draws: the truth is the
    same one after a knob is added.
    """
    rng = np.random.default_rng(seed)
    columns = problem.layouts.columns()
    levers = ("pipeline_layout", "recompute_layers", "offload", "optimizer_states")
    absent = [COORDINATE_KNOBS.index(name) for name in ("ep", "etp", *levers)]
    points = np.delete(knob_coordinates(columns), absent, axis=1)
    wave = 0.2 * np.sin(points @ rng.normal(0.0, 0.4, points.shape[1]))
    dense = np.array([not name.startswith("exchange") for name in TERM_NAMES])
    factors = PRIOR.copy()
    factors[dense] *= np.exp(rng.normal(0.0, 0.4, dense.sum()))
    step_s = time_terms(columns, problem.model, problem.cluster).step_time_s(factors)
    return step_s * np.exp(wave), 1.1 * peak_memory_bytes(columns, problem.model)


def run(
    problem: SearchProblem, name: str, seed: int, num_probes: int, pending: int = 1
) -> list[int]:
    """Positions in the order of the asks."""
    step_s, peaks = make_truth(problem)
    search = make_strategy(name, problem, seed=seed)
    tokens = 1e6
    asked: list[int] = []
    open_: list[int] = []
    for _ in range(num_probes):
        layout = search.ask()
        index = problem.layouts.index_of(layout)
        assert index is not None
        asked.append(index)
        open_.append(index)
        if len(open_) == pending:
            done = open_.pop(0)
            fits = peaks[done] <= problem.cluster.device_memory_bytes
            seen = (
                Observation.completed(
                    tokens / step_s[done],
                    step_time_s=float(step_s[done]),
                    peak_memory_bytes=int(peaks[done]),
                )
                if fits
                else INFEASIBLE
            )
            search.tell(problem.layouts.layout(done), seen)
    return asked


def objective_of(problem: SearchProblem) -> np.ndarray:
    """Tokens/s a device of each layout that fits; 0 of the others."""
    step_s, peaks = make_truth(problem)
    batch = problem.layouts.columns().global_batch_size
    fits = peaks <= problem.cluster.device_memory_bytes
    return np.where(fits, batch / step_s, 0.0)


def samples_of(
    problem: SearchProblem, model: ModelShape, step_s: np.ndarray, every: int = 1
) -> tuple[Sample, ...]:
    """Known measurements of another model, of some layouts of the problem."""
    return tuple(
        Sample(
            model=model,
            cluster=problem.cluster,
            layout=problem.layouts.layout(row),
            state="completed",
            step_time_s=float(step_s[row]),
        )
        for row in range(0, len(step_s), every)
    )


def probes_to(values: np.ndarray, asked: list[int], share: float) -> int:
    least = (1 - share) * values.max()
    good = (count for count, row in enumerate(asked, 1) if values[row] >= least)
    return next(good, len(asked) + 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pending", [1, 8])
def test_guided_finds_a_good_layout_in_a_handful_where_the_closed_form_is_wrong(
    pending: int,
) -> None:
    problem = make_search(memory_gib=12.0)
    values = objective_of(problem)
    near = int((values >= 0.95 * values.max()).sum())
    assert near <= 0.04 * len(values), "the target is too easy to tell anything"
    # One that takes more probes than it may counts as one too many.
    guided, random = (
        statistics.median(
            probes_to(values, run(problem, name, s, most, pending), 0.05) for s in range(3)
        )
        for name, most in (("guided", 11), ("random", 40))
    )
    assert guided <= 10
    assert guided <= 0.5 * random


@pytest.mark.parametrize(
    ("memory_gib", "headroom", "seeds"), [(8.0, 0.0, 1), (12.0, 0.4, 3)], ids=["all", "headroom"]
)
def test_guided_hardly_ever_asks_for_what_needs_more_memory_than_is_allowed(
    memory_gib: float, headroom: float, seeds: int
) -> None:
    problem = make_search(memory_gib=memory_gib, min_memory_headroom=headroom)
    _, peaks = make_truth(problem)
    is_over = peaks > (1.0 - headroom) * problem.cluster.device_memory_bytes
    assert is_over.mean() > 0.2
    asked = (run(problem, "guided", seed, 20) for seed in range(seeds))
    assert statistics.median(sum(is_over[row] for row in rows) for rows in asked) <= 2


@pytest.mark.slow
def test_several_objectives_spread_over_the_front() -> None:
    problem = make_search(objectives=("tokens_per_s_per_device", "memory_headroom"))
    values = objective_of(problem)
    _, peaks = make_truth(problem)
    both = np.stack([values, 1.0 - peaks / problem.cluster.device_memory_bytes], axis=1)
    alone = make_search()
    found = {
        name: {row for row in run(p, "guided", 0, 25) if pareto_front(both)[row]}
        for name, p in (("both", problem), ("alone", alone))
    }
    assert len(found["both"]) >= 3
    assert len(found["both"]) > len(found["alone"])


def test_what_cannot_run_does_not_count_for_the_ranges_of_the_objectives() -> None:
    objectives = ("tokens_per_s_per_device", "memory_headroom")
    problem = make_search(memory_gib=4.0, objectives=objectives)
    _, peaks = make_truth(problem)
    headroom = 1.0 - peaks / problem.cluster.device_memory_bytes
    assert headroom.min() < -1.0
    proposer, history = GuidedProposer(problem, seed=0), History(problem.layouts)
    belief = proposer._predictions.belief(history)
    weighing = proposer._select(history, belief, np.random.default_rng(0)).weighing
    assert weighing.low[1] > -0.5
    assert weighing.low[1] + weighing.span[1] > headroom.max() - 0.2


def test_before_anything_ran_layouts_fit_as_likely_as_the_belief_says() -> None:
    problem = make_search(memory_gib=12.0)
    columns = problem.layouts.columns()
    fitting = FittingBelief(problem, columns, knob_coordinates(columns).__getitem__)
    rows = np.arange(len(problem.layouts))
    probability = fitting.predict(History(problem.layouts), rows).probability
    memory = TrainerMemory.prior(problem.cluster, software=problem.software, campaign=HERE)
    expected = memory.fits(columns, problem.model, problem.cluster.device_memory_bytes)
    np.testing.assert_allclose(probability, expected, atol=1e-6)
    assert expected.min() < 0.1 < 0.9 < expected.max()


def test_a_failure_that_memory_does_not_explain_casts_doubt_on_its_neighbours() -> None:
    problem = make_search(memory_gib=80.0)
    columns = problem.layouts.columns()
    fitting = FittingBelief(problem, columns, knob_coordinates(columns).__getitem__)
    search = make_strategy("random", problem, seed=0)
    broken = int(np.flatnonzero((columns.pp == 32) & (columns.micro_batch_size == 1))[0])
    search.tell(problem.layouts.layout(broken), FAILED)
    near = int(np.flatnonzero((columns.pp == 32) & (columns.micro_batch_size == 2))[0])
    far = int(np.flatnonzero((columns.pp == 1) & (columns.tp == 8))[0])
    rows = np.array([broken, near, far])
    probability = fitting.predict(search._history, rows).probability
    assert probability[0] < probability[1] < 0.9 < probability[2]


def test_doubt_does_not_depend_on_how_many_are_judged_at_once() -> None:
    layouts = make_layouts(devices=256, micro_batch_sizes=(1, 2, 4, 8))
    problem = make_problem(layouts, cluster=make_cluster(device_memory_bytes=80 * GIB))
    columns = layouts.columns()
    fitting = FittingBelief(problem, columns, knob_coordinates(columns).__getitem__)
    search = make_strategy("random", problem, seed=0)
    for row in range(0, len(layouts), 40):
        search.tell(layouts.layout(row), (FAILED, INFEASIBLE)[row % 80 // 40])
    rows = np.arange(len(layouts))
    assert len(rows) > 700, "all would be predicted in one piece"
    together = fitting.predict(search._history, rows).probability
    alone = [fitting.predict(search._history, rows[[row]]).probability[0] for row in rows[::97]]
    np.testing.assert_allclose(together[::97], alone)
    assert together.min() < 0.5


def test_the_first_probe_of_every_seed_is_among_the_best_by_the_model() -> None:
    problem = make_search(memory_gib=12.0)
    model_order = run(problem, "model-only", 0, 40)
    for seed in range(3):
        assert run(problem, "guided", seed, 1)[0] in model_order


def test_guided_does_without_step_times() -> None:
    layouts = ListedLayouts([Layout(tp=tp, dp=8 // tp, num_microbatches=tp) for tp in (1, 2, 4, 8)])
    search = make_strategy("guided", make_problem(layouts), seed=0)
    for _ in range(4):
        layout = search.ask()
        search.tell(layout, Observation.completed(1000.0 / layout.tp))
    assert search.ask() is None


def test_what_is_pending_leaves_the_others_less_to_gain() -> None:
    search = make_strategy("guided", make_search(), seed=0)
    for _ in range(8):
        search.ask()
    history, proposer = search._history, search._proposer
    assert isinstance(proposer, GuidedProposer)

    def mean_gain() -> float:
        rng, belief = np.random.default_rng(0), proposer._predictions.belief(history)
        return float(proposer.weigh(proposer._select(history, belief, rng)).mean())

    with_pending = mean_gain()
    history.pending.clear()
    assert with_pending < 0.5 * mean_gain()


def test_a_run_that_was_slowed_down_is_measured_again_and_the_layout_is_not_lost() -> None:
    problem = make_search(memory_gib=12.0)
    step_s, peaks = make_truth(problem)
    tokens = problem.layouts.columns().global_batch_size * float(problem.model.seq_length)
    values = objective_of(problem)
    best = int(values.argmax())

    def tell(search: LayoutSearch, row: int, slowdown: float = 1.0) -> None:
        seconds = float(step_s[row]) * slowdown
        seen = Observation.completed(
            float(tokens[row]) / seconds, step_time_s=seconds, peak_memory_bytes=int(peaks[row])
        )
        search.tell(problem.layouts.layout(row), seen)

    search = make_strategy("guided", problem, seed=0)
    for row in np.argsort(-values)[1:60:4].tolist():
        tell(search, row)
    tell(search, best, slowdown=2.0)
    asked = [search.ask() for _ in range(4)]
    assert problem.layouts.layout(best) in asked
    tell(search, best)
    tell(search, best)
    pooled = search._history.observations[best]
    assert pooled.step_time_s == pytest.approx(float(step_s[best])), "the median of three runs"


def test_model_only_asks_in_the_order_of_the_estimates() -> None:
    problem = make_search(memory_gib=80.0)
    asked = run(problem, "model-only", 0, 10)
    expected = time_terms(problem.layouts.columns(), problem.model, problem.cluster).step_time_s()
    best = np.argsort(expected / problem.layouts.columns().global_batch_size)
    assert asked[0] in best[:3]
    assert set(asked) <= set(best[:30].tolist()), "but for what may not fit, in their order"
    assert len(set(asked)) == 10


def test_gains_far_below_zero_are_still_ordered() -> None:
    gains = soft_gains(np.array([-900.0, -20.0, 0.0, 30.0]))
    assert (np.diff(gains) > 0).all()
    assert gains[0] > 1e-7
    assert gains[-1] == pytest.approx(30.0, rel=0.01)


def test_measurements_of_another_model_move_the_first_prediction() -> None:
    cold = make_search()
    columns = cold.layouts.columns()
    small = resolve_model("gpt-125m")
    slow = PRIOR.copy()
    slow[TERM_NAMES.index("matrices")] *= 2.0
    step_s = time_terms(columns, small, cold.cluster).step_time_s(slow)
    warm = make_search(knowledge=Knowledge(samples=samples_of(cold, small, step_s, every=9)))
    rows = np.array([0])
    before, after = (
        Predictions(problem).belief(History(problem.layouts)).marginals(rows)[0][0]
        for problem in (cold, warm)
    )
    assert after > before + 0.1


def test_what_the_closed_form_missed_for_another_model_is_expected_of_this_one() -> None:
    cold = make_search()
    columns = cold.layouts.columns()
    smaller = replace(cold.model, name="smaller", num_layers=cold.model.num_layers // 2)
    off = 0.2 * np.sin(2.0 * np.log2(columns.tp) + np.log2(columns.micro_batch_size))
    step_s = time_terms(columns, smaller, cold.cluster).step_time_s() * np.exp(off)
    samples = samples_of(cold, smaller, step_s)
    warm = make_search(knowledge=Knowledge(samples=samples))
    predictions, rows = Predictions(warm), np.arange(len(warm.layouts))
    calibrated, _ = TimeCalibration.fit(samples).predict(columns, warm.model, warm.cluster)
    moved = predictions.belief(History(warm.layouts)).marginals(rows)[0] - calibrated
    assert np.corrcoef(moved, off)[0, 1] > 0.5


def search_of(name: str, **changes: object) -> LayoutSearch:
    spec = make_spec(**changes)
    problem = SearchProblem(
        layouts=spec.legal_set(), model=spec.model, cluster=spec.cluster, objectives=spec.objectives
    )
    return make_strategy(name, problem, seed=1)


def told(search: LayoutSearch, times: int) -> None:
    """Every layout is as fast as the one before it, within a few percent."""
    for turn in range(times):
        layout = search.ask()
        step_time_s = 0.5 * (1.0 + 0.03 * (turn % 3))
        tokens = layout.global_batch_size * 128 / layout.num_devices
        search.tell(layout, Observation.completed(tokens / step_time_s, step_time_s=step_time_s))


@pytest.mark.parametrize(
    ("changes", "more", "share"),
    [({}, 15, 1.0), ({"objective": ["tokens_per_s_per_device", "memory_headroom"]}, 20, 0.5)],
    ids=["the best", "a front"],
)
def test_guided_expects_less_the_more_it_knows(
    changes: dict[str, object], more: int, share: float
) -> None:
    search = search_of("guided", **changes)
    assert search.possible_improvement() is None, "nothing to improve on yet"
    told(search, 3)
    early = search.possible_improvement()
    assert early == search.possible_improvement(), "asked again, it says the same"
    told(search, more)
    late = search.possible_improvement()
    assert 0.0 <= late < share * early
    assert changes or late < 0.05


def test_after_failures_alone_a_search_cannot_tell_what_is_left_to_gain() -> None:
    search = search_of("guided")
    layout = search.ask()
    search.tell(layout, INFEASIBLE)
    assert search.possible_improvement() is None


@pytest.mark.parametrize("name", ["random", "deephyper"])
def test_strategies_without_a_belief_cannot_tell_what_is_left_to_gain(name: str) -> None:
    search = search_of(name)
    told(search, 3)
    assert search.possible_improvement() is None


def test_no_improvement_is_expected_of_an_exhausted_set() -> None:
    search = search_of("exhaustive")
    told(search, 28)
    assert search.ask() is None
    assert search.possible_improvement() == 0.0


@pytest.mark.parametrize(
    ("points", "volume"),
    [
        ([[1.0, 3.0], [2.0, 1.0], [1.0, 1.0]], 4.0),  # the last one is dominated
        ([[2.0, 3.0], [5.0, -1.0]], 6.0),
        ([[5.0, 0.0]], 0.0),
        ([[3.0], [4.0]], 4.0),
        (np.empty((0, 2)), 0.0),
    ],
)
def test_a_front_has_the_volume_of_its_boxes(points: list[list[float]], volume: float) -> None:
    assert hypervolume(np.array(points)) == pytest.approx(volume)


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_the_volume_is_the_share_of_random_points_that_some_point_beats(
    num_objectives: int,
) -> None:
    rng = np.random.default_rng(num_objectives)
    points = rng.random((12, num_objectives))
    drawn = rng.random((40_000, num_objectives))
    beaten = (drawn[:, None, :] <= points[None, :, :]).all(axis=2).any(axis=1).mean()
    assert hypervolume(points) == pytest.approx(beaten, abs=0.01)
