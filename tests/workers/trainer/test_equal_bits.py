"""What changes neither an operator's shapes nor the order of a sum changes no bit of the training.

Every family has its turn with each change; that every pair of knobs trains at all as it should is
for `test_parity.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES
from tests.workers.trainer.cases import (
    COLUMNS,
    CUT,
    DP,
    PP,
    TP,
    VPP,
    ZERO,
    ZERO_2,
    ZERO_3,
    assert_bitwise_equal,
    make_layout,
    make_shape,
    train,
)

pytestmark = pytest.mark.ranks

STEPS = 3
"""What differs once differs from then on."""
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
GPIPE, LATE = {"schedule": "gpipe"}, {"schedule": "zero_bubble"}
FEW = {"micro_batch_size": 4, "num_microbatches": 2}
ONE_PASS = {"micro_batch_size": 4, "num_microbatches": 1}
A2A = {"cp": 2, "cp_comm_type": "a2a"}
EMBEDDING, HEAD = {"pipeline_split": "embedding"}, {"pipeline_split": "head"}
BOTH = {"pipeline_split": "embedding_and_head"}

Case = tuple[str, int, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    ("gpt", 2, PP, {}),
    ("llama", 2, PP, TP),
    ("moe", 2, PP, DP),
    ("gpt", 2, PP, ZERO),
    ("llama", 2, PP, CUT),
    ("moe", 2, PP, ZERO_3),
    ("gpt", 2, PP, COLUMNS),
    ("llama", 4, {"pp": 4}, FEW),
    ("moe", 4, {"pp": 4}, {}),
    ("llama", 2, FULL, {}),
    ("moe", 2, FULL, PP | CUT),
    ("gpt", 2, FULL, ZERO),
    ("llama", 2, FULL, COLUMNS),
    ("moe", 2, SELECTIVE, {}),
    ("gpt", 2, SELECTIVE, TP | PP),
    ("llama", 2, SELECTIVE, ZERO),
    ("gpt", 2, SELECTIVE, BF16),
    ("llama", 2, SELECTIVE, COLUMNS),
    ("moe", 2, SELECTIVE, CUT),
    *(("llama", 2, SELECTIVE, {"cp": 2, "cp_comm_type": kind}) for kind in CP_COMM_TYPES),
    ("gpt", 2, {"zero_stage": 1}, DP | CUT),
    ("llama", 2, {"zero_stage": 1}, DP | BF16),
    # One micro-batch, and two ranks: gradients are added in the same order.
    ("moe", 2, {"zero_stage": 2}, ZERO | ONE_PASS),
    ("gpt", 2, {"zero_stage": 3}, ZERO | ONE_PASS | TP),
    ("llama", 2, {"zero_stage": 3}, ZERO_2 | PP),
    ("moe", 2, {"zero_stage": 3}, ZERO_2 | CUT),
    ("gpt", 2, {"zero_stage": 3}, ZERO_2 | BF16),
    ("llama", 2, {"zero_stage": 3}, ZERO_2 | FULL),
    *(("gpt", 2, {"zero_stage": stage}, {}) for stage in (1, 2, 3)),  # of one replica
    ("gpt", 3, PP | EMBEDDING, {}),
    ("llama", 3, PP | EMBEDDING, TP),
    ("moe", 3, PP | EMBEDDING, DP),
    ("gpt", 3, PP | EMBEDDING, BF16),
    ("llama", 3, PP | HEAD, {}),
    ("moe", 3, PP | HEAD, CUT),
    ("gpt", 3, PP | HEAD, FULL),
    ("llama", 4, PP | BOTH, ZERO),
    ("moe", 3, {"pp": 4} | EMBEDDING, {}),  # its first stage has no layer
    ("gpt", 3, {"pp": 4} | HEAD, {}),
    ("llama", 2, {"pp": 4} | BOTH, {}),
    ("moe", 6, {"pp": 4} | BOTH, {}),
    ("moe", 3, VPP | EMBEDDING, {}),
    ("gpt", 3, VPP | HEAD, {}),
    ("llama", 2, VPP | BOTH, {}),
    ("gpt", 7, VPP | EMBEDDING, DP),
    ("llama", 7, VPP | HEAD, TP | SELECTIVE),
    ("llama", 8, VPP, {}),
    ("gpt", 8, {"pp": 2, "vpp": 4}, {}),
    ("llama", 8, {"pp": 4, "vpp": 2}, {}),
    ("moe", 4, VPP, CUT),
    ("gpt", 4, VPP, DP),
    ("llama", 4, VPP, ZERO),
    ("moe", 4, VPP, FULL),
    ("gpt", 4, VPP, BF16),
    *(("gpt", 4, schedule, PP) for schedule in (GPIPE, LATE)),
    ("llama", 4, LATE, PP | ONE_PASS),
    ("moe", 4, LATE, {"pp": 4}),
    ("gpt", 4, LATE, PP | FULL),
    ("llama", 4, GPIPE, PP | FULL),
    ("moe", 4, LATE, PP | SELECTIVE),
    ("gpt", 4, LATE, PP | BF16),
    ("llama", 4, GPIPE, PP | FP16),
    ("gpt", 4, LATE, PP | FP16),
    ("llama", 4, LATE, PP | CUT),
    ("moe", 4, LATE, PP | A2A),
    ("llama", 4, GPIPE, PP | A2A),
    ("gpt", 4, LATE, PP | ZERO),
    ("llama", 4, LATE, PP | ZERO_2),
    ("moe", 4, GPIPE, PP | ZERO_2),
    ("gpt", 4, LATE, PP | ZERO_3 | FULL),
    ("moe", 4, LATE, PP | DP | {"ep": 2}),
    ("llama", 3, LATE, PP | EMBEDDING),
    ("llama", 2, LATE, PP | COLUMNS),
    ("gpt", 2, {"rank_order": "tp_cp_pp_dp"}, PP | ZERO),
    ("llama", 2, {"rank_order": "tp_cp_pp_dp"}, PP | ZERO_3),
]
"""Family, layers, what is changed, and what it is changed beside."""
OF_EIGHT: list[Case] = [
    ("moe", 2, {"rank_order": "tp_cp_pp_dp"}, PP | DP | CUT | {"ep": 2}),
    ("llama", 2, {"rank_order": "tp_cp_pp_dp"}, PP | A2A | ZERO_2 | {"zero_replicas": 2}),
    ("gpt", 2, {"rank_order": "tp_cp_pp_dp"}, PP | DP | TP | LATE),
]
TIED: list[Case] = [
    ("gpt", 4, {"vpp": 2}, PP),
    ("llama", 4, {"vpp": 2}, PP | CUT),
    ("moe", 4, {"vpp": 2}, PP | DP),
    ("gpt", 4, {"vpp": 2}, PP | ZERO_3),
]
"""Gradients of both ends are summed over the first and the last stage under both."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "num_layers", "change", "beside", "tied"),
    [
        *((*case, False) for case in CASES),
        *((*case, True) for case in TIED),
        *(pytest.param(*case, False, marks=pytest.mark.slow) for case in OF_EIGHT),
    ],
    ids=str,
)
def test_it_changes_no_bit_of_the_training(
    family: str, num_layers: int, change: dict[str, Any], beside: dict[str, Any], tied: bool
) -> None:
    shape = make_shape(family, num_layers=num_layers, tied_embeddings=tied)
    found = train(shape, make_layout(**beside | change), steps=STEPS)
    assert_bitwise_equal(found, train(shape, make_layout(**beside), steps=STEPS))
