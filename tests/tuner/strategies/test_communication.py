"""The strategy `communication`: its seconds and its order on cases that are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.presets.models import resolve_model
from tests.tuner.search_problems import ListedLayouts, make_cluster, make_problem
from tuner.strategies.communication import communication_s
from tuner.strategies.registry import make_strategy

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
