"""Peaks of ranks whose layers are one sublayer alone, or blocks with other norms and residuals."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.workers.trainer.cases import CUT, PP, ZERO_3, in_turn, make_shape
from tests.workers.trainer.test_memory import FULL, LATE, SIZES, WIDTHS, assert_estimated

pytestmark = pytest.mark.ranks


@pytest.mark.sampled(3)
@in_turn(("axes", "width"), [PP, PP | FULL, PP | ZERO_3, PP | {"schedule": "gpipe"}], [64, 256])
def test_a_stage_of_lone_sublayers_holds_what_is_estimated(
    axes: dict[str, Any], width: int
) -> None:
    """When the largest layer's backward pass comes, those behind it hold nothing any more."""
    layout = Layout(micro_batch_size=8, num_microbatches=8, **axes)
    narrow = {"ffn_hidden_size": width, "moe_ffn_hidden_size": width // 4}
    assert_estimated(layout, make_shape("hybrid", **SIZES | narrow), 0.95, 1.05)


@pytest.mark.sampled(3)
@in_turn(
    ("axes", "changes"),
    [{}, CUT, PP, LATE, CUT | {"recompute": "mlp"}, CUT | {"recompute": "layernorm"}],
    [{"qk_norm": "width", "attention_output_gate": True}, {"parallel_block": True}],
)
def test_a_rank_of_other_blocks_holds_what_is_estimated(
    axes: dict[str, Any], changes: dict[str, Any]
) -> None:
    layout = Layout(micro_batch_size=8, num_microbatches=8 if "pp" in axes else 2, **axes)
    low = 0.95 if layout.schedule == "zero_bubble" else 0.98
    assert_estimated(layout, make_shape(**WIDTHS | changes), low, 1.02)
