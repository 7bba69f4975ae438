"""The contract of every strategy, whatever its algorithm, and the order of `communication`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from search_spaces.belief.known_measurements import Sample
from search_spaces.belief.observation import (
    FAILED,
    INFEASIBLE,
    Observation,
    ObservationInvalidError,
)
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.presets.models import resolve_model
from tests.tuner.search_problems import ListedLayouts, make_cluster, make_problem
from tuner.errors import LayoutUnknownError, ProblemInvalidError, StrategyUnknownError
from tuner.strategies.base import LayoutSearch
from tuner.strategies.communication import communication_s
from tuner.strategies.registry import STRATEGIES, make_strategy


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

    def test_eight_pending_are_eight_different_layouts(self, name: str) -> None:
        search = make_strategy(name, make_problem(make_layouts()), seed=3)
        pending = [search.ask() for _ in range(8)]
        asked = list(pending)
        while pending[0] is not None:
            layout = pending.pop(0)
            search.tell(layout, throughput(layout))
            pending.append(search.ask())
            asked.append(pending[-1])
            if len(asked) > 24:
                break
        assert len(set(asked)) == len(asked)

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
        ({"state": "completed", "objective": -3.0}, "not a finite number over 0"),
        ({"state": "completed", "objective": float("nan")}, "not a finite number over 0"),
        ({"state": "completed", "objective": float("inf")}, "not a finite number over 0"),
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


def test_the_least_communication_comes_first() -> None:
    """1.8, 2.2, 4.2, 4.5 and 6.2 ms."""
    by_hand = [CASES[place][0] for place in (2, 1, 3, 0, 4)]
    problem = make_problem(ListedLayouts([a for a, _ in CASES]), model=MODEL, cluster=MACHINE)
    search = make_strategy("communication", problem, seed=0)
    assert [search.ask() for _ in CASES] == by_hand
