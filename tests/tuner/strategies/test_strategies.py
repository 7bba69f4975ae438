"""The contract of every strategy, the order of `communication`, and what DeepHyper is worth."""

from __future__ import annotations

import logging
import random
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.observation import (
    FAILED,
    INFEASIBLE,
    Observation,
    ObservationInvalidError,
)
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.predictions.estimates.trainer_storage import storage_of
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.spaces.search_space import LegalSet
from layout_tuner.tuner.errors import (
    LayoutUnknownError,
    ProblemInvalidError,
    StrategyUnavailableError,
    StrategyUnknownError,
)
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSearch
from layout_tuner.tuner.strategies.communication import communication_s
from layout_tuner.tuner.strategies.deephyper import (
    MAX_CANDIDATES,
    MAX_NEIGHBOURS,
    NUM_BEST,
    DeepHyperProposer,
    KnobRanks,
)
from layout_tuner.tuner.strategies.predictions import order_by_estimate
from layout_tuner.tuner.strategies.registry import STRATEGIES, make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from tests.kit.campaigns import spec_of
from tests.tuner.search_problems import ListedLayouts, make_cluster, make_problem


def make_layouts(*, devices: int = 8, micro_batch_sizes: tuple[int, ...] = (1, 2)) -> ListedLayouts:
    degrees = [2**i for i in range(devices.bit_length())]
    return ListedLayouts(
        [
            Layout(
                tp=tp,
                pp=pp,
                dp=devices // (tp * pp),
                micro_batch_size=micro_batch_size,
                zero_stage=zero_stage,
                recompute=recompute,
            )
            for tp, pp, micro_batch_size, zero_stage, recompute in product(
                degrees, degrees, micro_batch_sizes, (0, 1), ("none", "full")
            )
            if devices % (tp * pp) == 0 and tp * pp <= devices
        ]
    )


def throughput(layout: Layout) -> Observation:
    return Observation.completed(1000.0 / (layout.tp + 2 * layout.pp + 3 / layout.micro_batch_size))


def ask_all(search: LayoutSearch, judge: Callable[[Layout], Observation]) -> list[Layout]:
    asked = []
    while (layout := search.ask()) is not None:
        asked.append(layout)
        search.tell(layout, judge(layout))
    return asked


@pytest.mark.parametrize("name", sorted(STRATEGIES))
class TestEveryStrategy:
    def test_asks_for_every_legal_layout_exactly_once_and_again_with_the_same_seed(
        self, name: str
    ) -> None:
        layouts = make_layouts(devices=4)
        first, second = (
            ask_all(make_strategy(name, make_problem(layouts), seed=5), throughput)
            for _ in range(2)
        )
        assert first == second
        assert len(first) == len(layouts) == len(set(first))
        assert all(layouts.index_of(layout) is not None for layout in first)

    def test_exhausts_without_being_told_anything(self, name: str) -> None:
        layouts = make_layouts(devices=4)
        search = make_strategy(name, make_problem(layouts), seed=1)
        asked = {search.ask() for _ in range(len(layouts))}
        assert None not in asked
        assert len(asked) == len(layouts)
        assert search.ask() is None
        assert len(search._history.pending) == len(layouts)

    def test_one_layout_is_asked_for_and_then_none(self, name: str) -> None:
        only = ListedLayouts([Layout()])
        assert ask_all(make_strategy(name, make_problem(only), seed=0), throughput) == [Layout()]

    def test_survives_that_every_layout_fails(self, name: str) -> None:
        layouts = make_layouts()
        outcomes = {layouts.layout(i): (FAILED, INFEASIBLE)[i % 2] for i in range(len(layouts))}
        asked = ask_all(make_strategy(name, make_problem(layouts), seed=2), outcomes.__getitem__)
        assert len(set(asked)) == len(layouts)

    @pytest.mark.slow
    def test_survives_that_97_of_100_fail(self, name: str) -> None:
        layouts = make_layouts(devices=32, micro_batch_sizes=(1, 2, 4))
        dice = random.Random(7)
        works = {layouts.layout(i): dice.random() < 0.03 for i in range(len(layouts))}
        asked = ask_all(
            make_strategy(name, make_problem(layouts), seed=2),
            lambda layout: throughput(layout) if works[layout] else FAILED,
        )
        assert 0 < sum(works.values()) < 20
        assert len(set(asked)) == len(layouts)

    @pytest.mark.parametrize("killed_after", [1, 20])
    def test_rebuilt_by_telling_again_it_goes_on_as_if_never_killed(
        self, name: str, killed_after: int
    ) -> None:
        layouts = make_layouts()
        search = make_strategy(name, make_problem(layouts), seed=4)
        pending = [search.ask() for _ in range(3)]
        told = []
        for _ in range(killed_after):
            layout = pending.pop(len(told) % 3)
            observation = throughput(layout) if layout.tp < 4 else INFEASIBLE
            search.tell(layout, observation)
            told.append((layout, observation))
            pending.append(search.ask())
        rebuilt = make_strategy(name, make_problem(layouts), seed=4)
        for layout, observation in told:
            rebuilt.tell(layout, observation)
        for layout in pending:
            rebuilt.resume(layout)
        taken = {layout for layout, _ in told} | set(pending)
        if name == "guided":  # it may measure again what it doubts
            taken -= {layout for layout, seen in told if seen.state == "completed"}
        for _ in range(4):
            proposal = rebuilt.ask()
            assert proposal is not None
            assert proposal not in taken
            assert proposal == search.ask()
            taken.add(proposal)

    def test_what_was_withdrawn_or_told_unasked_is_not_asked_for(self, name: str) -> None:
        layouts = make_layouts(devices=4, micro_batch_sizes=(1,))
        search = make_strategy(name, make_problem(layouts), seed=4)
        withdrawn = search.ask()
        search.withdraw(withdrawn)
        assert not search._history.pending
        known = next(each for each in map(layouts.layout, range(2)) if each != withdrawn)
        search.tell(known, throughput(known))
        asked = ask_all(search, throughput)
        assert not {withdrawn, known} & set(asked)
        assert len(set(asked)) == len(layouts) - 2

    def test_a_layout_outside_the_set_is_refused_by_name(self, name: str) -> None:
        search = make_strategy(name, make_problem(make_layouts(devices=4)), seed=4)
        with pytest.raises(LayoutUnknownError, match=r"n1-tp64-pp1-.* 48 legal layouts"):
            search.tell(Layout(tp=64), FAILED)


def test_different_seeds_shuffle_differently() -> None:
    layouts = make_layouts()
    first, second = (
        ask_all(make_strategy("random", make_problem(layouts), seed=seed), throughput)
        for seed in (1, 2)
    )
    assert first != second


def test_exhaustive_keeps_the_canonical_order() -> None:
    layouts = make_layouts(devices=4)
    asked = ask_all(make_strategy("exhaustive", make_problem(layouts), seed=9), throughput)
    assert asked == [layouts.layout(i) for i in range(len(layouts))]


def test_an_unknown_strategy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        StrategyUnknownError,
        match=r"'anneal'.*communication, deephyper, deephyper\+memory, exhaustive, guided, model-only, random",
    ):
        make_strategy("anneal", make_problem(make_layouts()), seed=0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"state": "completed", "objective": 0.0}, "not a finite number over 0"),
        ({"state": "completed", "objective": float("nan")}, "not a finite number over 0"),
        ({"state": "failed", "objective": 3.0}, "does not go with"),
        ({"state": "infeasible", "step_time_s": 2.0}, r"does not go with step_time_s=2\.0"),
        (
            {"state": "completed", "objective": 3.0, "peak_memory_bytes": -1},
            r"peak_memory_bytes=-1 is not a finite",
        ),
    ],
)
def test_an_observation_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ObservationInvalidError, match=said):
        Observation(**fields)


def test_a_sample_from_elsewhere_has_a_step_time_if_it_ran() -> None:
    problem = make_problem(ListedLayouts([Layout()]))
    with pytest.raises(ObservationInvalidError, match="state='completed' does not go with"):
        Sample(model=problem.model, cluster=make_cluster(), layout=Layout(), state="completed")


@pytest.mark.parametrize(
    "changes",
    [
        {"objectives": ()},
        {"objectives": ("memory_headroom", "tokens_per_s")},
        {"min_memory_headroom": 1.0},
    ],
)
def test_a_problem_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    said = r"no objective|'memory_headroom' cannot rank|min_memory_headroom=1\.0"
    with pytest.raises(ProblemInvalidError, match=said):
        make_problem(ListedLayouts([Layout()]), **changes)


H, TOKENS = 1024, 1024
MODEL = replace(
    resolve_model("gpt-1.3b"),
    num_layers=2,
    hidden_size=H,
    ffn_hidden_size=4 * H,
    num_heads=16,
    num_kv_heads=16,
    seq_length=TOKENS,
)
MACHINE = make_cluster(inter_node_latency_s=1e-5)
"""200 GB/s inside a node of eight, 25 GB/s of each device between nodes."""
MATRICES = 2 * 12 * H * H


def layout(**knobs: Any) -> Layout:
    """16 sequences a step, in micro-batches of one, on two nodes."""
    dp = knobs.get("dp", 1)
    return Layout(**{"num_nodes": 2, "num_microbatches": 16 // dp, "precision": "bf16"} | knobs)


CASES = [
    # A scatter and two gathers at 16 bits; 12 of them a layer, of 16 ranks.
    (layout(dp=16, zero_stage=3), 6 * MATRICES * 15 / 16 / 200e9 + 24 * 16 * 1e-5),
    # Gradients in fp32, and four of them a layer; 25 GB/s for each rank that is on the node.
    (layout(dp=16), 8 * MATRICES * 15 / 16 / 200e9 + 8 * 16 * 1e-5),
    # Four residual streams a layer, each sent twice at 16 bits; two replicas on different nodes.
    (
        layout(tp=8, dp=2),
        16 * 2 * TOKENS * 4 * H * 4 / 2 * 7 / 8 / 200e9 + MATRICES / 8 * 4 / 25e9 + 8 * 2 * 1e-5,
    ),
    # 12 of them, also that of the down projection: forward 3 + 4, backward 1 + 4.
    (
        layout(tp_columns=8, dp=2),
        16 * 2 * TOKENS * 12 * H * 4 / 2 * 7 / 8 / 200e9 + MATRICES / 8 * 4 / 25e9 + 8 * 2 * 1e-5,
    ),
    (
        layout(tp_columns=8, dp=2, recompute="full"),
        16 * 2 * TOKENS * 19 * H * 4 / 2 * 7 / 8 / 200e9 + MATRICES / 8 * 4 / 25e9 + 8 * 2 * 1e-5,
    ),
]


@pytest.mark.parametrize(("asked", "expected_s"), CASES)
def test_the_communication_of_a_step_takes_the_seconds_worked_out_by_hand(
    asked: Layout, expected_s: float
) -> None:
    columns = LayoutColumns.of_each([asked])
    assert communication_s(columns, MODEL, MACHINE)[0] == pytest.approx(expected_s)


def test_replicas_sum_the_weights_of_every_expert_once() -> None:
    small = replace(resolve_model("qwen3-30b-a3b"), num_layers=2, num_experts=8)
    large = replace(small, num_experts=16)
    columns = LayoutColumns.of_each([layout(dp=16)])
    small_s, large_s = (communication_s(columns, model, MACHINE)[0] for model in (small, large))
    more = large.num_layer_matrix_parameters - small.num_layer_matrix_parameters
    assert large_s - small_s == pytest.approx(8 * 2 * more * 15 / 16 / 200e9)


def test_layers_that_recompute_communicate_again() -> None:
    half, every = (
        layout(tp_columns=8, recompute="full", recompute_layers=layers) for layers in ("1", "all")
    )
    seconds = [
        communication_s(LayoutColumns.of_each([each]), MODEL, MACHINE)[0]
        for each in (replace(every, recompute="none"), half, every)
    ]
    assert MODEL.num_layers == 2
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
    assert seconds[2] > 1.5 * seconds[0]


def test_kinds_of_layers_communicate_as_their_sum() -> None:
    """Two layers, as four of one sublayer each, of which a sum is the layers'."""
    llama = replace(MODEL, family="llama", tied_embeddings=False)
    halves = replace(llama, num_layers=4, layer_kinds=("full", "dense"))
    for asked, _ in CASES[1:3]:
        columns = LayoutColumns.of_each([asked])
        whole_s, halves_s = (communication_s(columns, m, MACHINE)[0] for m in (llama, halves))
        assert halves_s == pytest.approx(whole_s, rel=1e-3)


def test_the_least_communication_comes_first() -> None:
    """1.8, 2.2, 4.2, 4.5 and 6.2 ms."""
    by_hand = [CASES[place][0] for place in (2, 1, 3, 0, 4)]
    problem = make_problem(ListedLayouts([a for a, _ in CASES]), model=MODEL, cluster=MACHINE)
    search = make_strategy("communication", problem, seed=0)
    assert [search.ask() for _ in CASES] == by_hand


NEVER = 400


def make_legal_set(**space: object) -> LegalSet:
    knobs = {
        "global_batch_size": {"min": 128, "max": 1024},
        "num_nodes": 4,
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4, 8, 16],
        "micro_batch_size": [1, 2, 4, 8, 16],
        "num_microbatches": [4, 8, 16, 32, 64, 128],
        "zero_stage": [0, 1],
        "recompute": ["none", "full"],
    }
    cluster = {"preset": "a100-sxm", "num_nodes": 8}
    return spec_of(model="gpt-22b", cluster=cluster, space=knobs | space).legal_set()


def measure(layout: Layout) -> Observation:
    """A rough roofline with costs of small batches, pipelines and communication; some overflow."""
    states = 352.0 * (1.0 if layout.zero_stage == 0 else 0.25 + 0.75 / layout.dp)
    activations = layout.micro_batch_size * (1.0 if layout.recompute == "full" else 10.0)
    if states / (layout.tp * layout.pp) + activations / layout.tp > 75.0:
        return INFEASIBLE
    compute = 1.33 if layout.recompute == "full" else 1.0
    starved = 1.0 + 0.6 * layout.tp**0.5 / layout.micro_batch_size
    bubble = (layout.pp - 1) / layout.num_microbatches
    talk = 0.15 * np.log2(layout.tp) + 4.0 * np.log2(layout.dp) / layout.num_microbatches
    return Observation.completed(100.0 / (compute * starved * (1.0 + bubble) + talk))


def probes_to(search: LayoutSearch, target: float) -> int:
    for probe in range(1, NEVER):
        layout = search.ask()
        if layout is None:
            return NEVER
        observation = measure(layout)
        if observation.objective is not None and observation.objective >= target:
            return probe
        search.tell(layout, observation)
    return NEVER


@pytest.mark.slow
def test_deephyper_needs_far_fewer_probes_than_random_search() -> None:
    legal = make_legal_set()
    values = [measure(legal.layout(i)).objective for i in range(len(legal))]
    best = max(value for value in values if value is not None)
    near = sum(value is not None and value >= 0.9 * best for value in values)
    assert near <= 0.01 * len(legal), "the target is too easy to tell anything"
    medians = {
        name: statistics.median(
            probes_to(make_strategy(name, make_problem(legal), seed=seed), 0.9 * best)
            for seed in range(11)
        )
        for name in ("deephyper", "random")
    }
    assert medians["deephyper"] <= 0.5 * medians["random"], medians


class CountingProposer(DeepHyperProposer):
    """Counts how often it goes beyond drawing at random."""

    num_fits = 0

    def _ask_cbo(self, *args: object) -> int:
        self.num_fits += 1
        return super()._ask_cbo(*args)  # type: ignore[arg-type]


def test_failures_count_for_the_random_start_and_files_and_loggers_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.csv").write_text("mine\n")
    handlers = list(logging.getLogger().handlers)
    legal = make_legal_set()
    search = LayoutSearch(legal, counting := CountingProposer(legal, seed=1))
    for index in range(30):
        search.tell(legal.layout(index), FAILED)
    search.tell(legal.layout(30), Observation.completed(5.0))
    search.ask()
    assert counting.num_fits == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    assert logging.getLogger().handlers == handlers


def test_what_breaks_the_headroom_counts_as_a_failure() -> None:
    legal = make_legal_set()

    def asked(headroom: float, told: Observation) -> list[Layout | None]:
        problem = make_problem(legal, min_memory_headroom=headroom)
        search = make_strategy("deephyper", problem, seed=1)
        for index in range(0, 30, 3):
            search.tell(legal.layout(index), Observation.completed(1.0 + index))
            search.tell(legal.layout(index + 1), told)
        return [search.ask() for _ in range(3)]

    memory = make_problem(legal).cluster.device_memory_bytes
    large = Observation.completed(500.0, peak_memory_bytes=memory * 19 // 20)
    assert asked(0.1, large) == asked(0.1, FAILED)
    assert asked(0.01, large) != asked(0.01, FAILED)


def test_ranks_order_words_by_the_memory_they_save() -> None:
    legal = make_legal_set(recompute=["full", "none"], precision=["bf16", "fp32"])
    ranks = KnobRanks(legal)
    assert "num_nodes" not in ranks.names
    assert list(ranks.names) == sorted(ranks.names)
    for knob, words in (("recompute", ("none", "full")), ("precision", ("fp32", "bf16"))):
        column = ranks.rows(np.arange(len(legal)))[:, ranks.names.index(knob)]
        layouts = [legal.layout(position) for position in range(len(legal))]
        expected = [words.index(getattr(layout, knob)) for layout in layouts]
        assert column.tolist() == expected


def test_ranks_are_places_among_the_values_that_occur() -> None:
    # dp is derived, pp=5 and tp=3 are never legal, and no choices are listed in order.
    legal = make_legal_set(tp=[8, 3, 1, 2], pp=[16, 1, 5, 4], micro_batch_size=[4, 1, 2])
    ranks = KnobRanks(legal)
    assert {"tp", "pp", "dp", "micro_batch_size"} <= set(ranks.names)
    layouts = [legal.layout(position) for position in range(len(legal))]
    rows = ranks.rows(np.arange(len(legal)))
    for place, name in enumerate(ranks.names):
        values = [code_of(name, getattr(layout, name)) for layout in layouts]
        occurring = sorted(set(values))
        assert rows[:, place].tolist() == [occurring.index(value) for value in values]
        assert ranks.num_values[place] == len(occurring)
    steps = np.abs(rows - rows[7]).sum(axis=1)
    assert ranks.steps_from(7).tolist() == steps.tolist()


def test_more_values_than_a_short_holds_have_ranks_of_their_own() -> None:
    ranks = KnobRanks(ListedLayouts(Layout(dp=dp) for dp in range(1, 40_001)))
    assert ranks.num_values == (40_000,)
    assert ranks.rows(np.array([39_999])).tolist() == [[39_999]]
    assert int(ranks.steps_from(39_999)[0]) == 39_999


def test_the_ranks_of_many_layouts_take_little_memory() -> None:
    legal = make_legal_set(
        global_batch_size={"max": 1 << 20},
        num_nodes=[1, 2, 4, 8],
        micro_batch_size=list(range(1, 65)),
        num_microbatches=list(range(1, 33)),
    )
    assert len(legal) > 400_000
    tracemalloc.start()
    try:
        KnobRanks(legal)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 80 * len(legal)  # of strings one column alone would take 20 a layout


@pytest.mark.slow
def test_a_proposal_among_100_000_layouts_judges_few_of_them_with_500_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost of a proposal is counted, not timed: layouts used in fits and in predictions."""
    legal = make_legal_set(
        global_batch_size={"min": 64, "max": 100_000},
        num_nodes=[1, 2, 3, 4],
        pp=[1, 2, 3, 4, 6, 8, 12, 16, 24],
        micro_batch_size=list(range(1, 17)),
        num_microbatches=list(range(1, 33)),
    )
    assert 90_000 < len(legal) < 150_000
    search = make_strategy("deephyper", make_problem(legal), seed=1)
    for index in np.random.default_rng(0).choice(len(legal), 500, replace=False):
        layout = legal.layout(int(index))
        search.tell(layout, measure(layout))
    judged: list[int] = []
    points = DeepHyperProposer._points

    def counting(self: DeepHyperProposer, indices: NDArray[np.int64]) -> list[dict[str, int]]:
        judged.append(len(indices))
        return points(self, indices)

    monkeypatch.setattr(DeepHyperProposer, "_points", counting)
    for told in range(500, 503):
        judged.clear()
        layout = search.ask()
        search.tell(layout, measure(layout))
        candidates, fitted = judged
        assert candidates <= MAX_CANDIDATES + NUM_BEST * MAX_NEIGHBOURS < len(legal) / 10
        assert fitted == told


def make_memory_search(legal: LegalSet, problem: SearchProblem) -> tuple[LayoutSearch, set[Layout]]:
    """The search, and the layouts that are estimated to fit."""
    storage = storage_of(problem.software, problem.cluster)
    peaks = peak_memory_bytes(legal.columns(), problem.model, storage)
    fitting = np.flatnonzero(peaks <= problem.cluster.device_memory_bytes).tolist()
    search = make_strategy("deephyper+memory", problem, seed=0)
    return search, {legal.layout(index) for index in fitting}


def test_with_memory_the_search_starts_with_the_ten_best_estimates_that_fit() -> None:
    legal = make_legal_set(num_microbatches=[8, 16])
    problem = make_problem(legal)
    search, fitting = make_memory_search(legal, problem)
    assert 20 < len(fitting) < len(legal), "some fit and some do not"
    ranked = [legal.layout(index) for index in order_by_estimate(problem)]
    assert [search.ask() for _ in range(10)] == [each for each in ranked if each in fitting][:10]


def test_with_memory_what_is_estimated_not_to_fit_comes_last() -> None:
    legal = make_legal_set(num_microbatches=8, micro_batch_size=[4, 16], recompute="none")
    search, fitting = make_memory_search(legal, make_problem(legal))
    assert 0 < len(fitting) < len(legal)
    asked = []
    while (layout := search.ask()) is not None:
        asked.append(layout)
        search.tell(layout, measure(layout))
    assert set(asked[: len(fitting)]) == fitting
    assert len(asked) == len(set(asked)) == len(legal)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_only_deephypers_strategies_need_deephyper_and_they_say_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deephyper", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "layout_tuner.tuner.strategies.deephyper", raising=False)
    problem = make_problem(make_layouts())
    if not name.startswith("deephyper"):
        make_strategy(name, problem, seed=0)
        return
    with pytest.raises(StrategyUnavailableError) as refused:
        make_strategy(name, problem, seed=0)
    assert str(refused.value) == (
        f"`strategy={name}` needs deephyper, which is not installed; run: pip install "
        "'layout-tuner[driver]'; or submit the campaign with another strategy"
    )
