"""What is stored of types of 8 bits or fewer."""

from __future__ import annotations

import math

import pytest

from layout_tuner.results_db.trials.loss_check import loss_tolerance
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout, Precision
from layout_tuner.search_spaces.layouts.layout_columns import (
    LayoutColumns,
    code_of,
    codes_of,
    of_narrow,
    wide_codes,
)
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW, wide_precision

ROWS, COLUMNS = 512, 768


@pytest.mark.parametrize(
    ("precision", "bits", "block", "scale"),
    [("fp8_block", 8, 128, 4), ("mxfp8", 8, 32, 1), ("nvfp4", 4, 16, 1)],
)
def test_a_tensor_is_stored_with_its_scales(
    precision: str, bits: int, block: int, scale: int
) -> None:
    elements, scales = ROWS * COLUMNS * bits // 8, ROWS * math.ceil(COLUMNS / block) * scale
    assert NARROW[precision].stored_bytes * ROWS * COLUMNS == elements + scales


def test_weights_are_held_along_both_sides() -> None:
    """Bytes of a weight, with ZeRO and without."""
    found = {
        name: tuple(of.weight_bytes(is_sharded=shards) for shards in (True, False))
        for name, of in NARROW.items()
    }
    assert found == {
        "fp8": (2.0, 2.0),
        "fp8_block": (4.0625, 4.0625),
        "mxfp8": (2.0625, 4.0625),
        "nvfp4": (1.125, 3.125),
    }


def test_what_stays_wide_is_bf16_beside_narrow_types() -> None:
    wide = {name: wide_precision(name) for name in PRECISIONS}
    assert wide == {name: "bf16" if name in NARROW else name for name in PRECISIONS}
    codes = codes_of("precision", PRECISIONS)
    assert [PRECISIONS[code] for code in wide_codes(codes)] == [*wide.values()]
    bits = of_narrow(codes, lambda of: of.stored_bytes)
    assert (bits > 0).tolist() == [name in NARROW for name in PRECISIONS]


def test_presets_have_the_peaks_of_their_formats() -> None:
    narrow = {name: cluster.peak_flops_per_s for name, cluster in CLUSTER_PRESETS.items()}
    in_4_bits = {name: peaks["nvfp4"] for name, peaks in narrow.items() if "nvfp4" in peaks}
    assert in_4_bits == {"b200": 9e15, "b300": 13.5e15, "gb200": 10e15, "gb300": 15e15}
    by_32 = {name for name, peaks in narrow.items() if peaks.get("mxfp8") == peaks.get("fp8", 0)}
    assert by_32 == {*in_4_bits, "mi355x"}
    by_128 = {name for name, peaks in narrow.items() if "fp8_block" in peaks}
    assert by_128 == {"h100-sxm", "h100-hbm2e", "h200", "h800", "gh200", "alps"}


@pytest.mark.parametrize("precision", list(NARROW))
def test_a_narrow_layout_has_a_key_and_a_code(precision: Precision) -> None:
    layout = Layout(precision=precision, cp=2, ep=2)
    assert Layout.of_key(layout.key) == layout
    assert Layout.from_mapping(layout.to_mapping()) == layout
    assert LayoutColumns.of(layout).precision == code_of("precision", precision)


def test_losses_of_fewer_bits_may_differ_more() -> None:
    order: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "fp8", "nvfp4")
    allowed = [loss_tolerance(each, 0) for each in order]
    assert allowed == sorted(allowed)
    assert all(loss_tolerance(each, 0) == 0.05 for each in ("fp8", "fp8_block", "mxfp8"))
