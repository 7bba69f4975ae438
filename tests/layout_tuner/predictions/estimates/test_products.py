"""Rates of measured operators, and what trainers' kernels add to a block's time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.predictions.estimates.products import (
    M_GRID,
    NK_GRID,
    ProductRates,
    attention_flops_per_s,
    flash_2_share,
    product_rates,
)
from layout_tuner.predictions.estimates.step_time import (
    TERM_NAMES,
    step_time_parts,
    step_time_s,
    time_terms,
)
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.clusters.cluster import MEASURED_SOURCE, Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

A100, H100, FRONTIER = (CLUSTER_PRESETS[name] for name in ("a100-sxm", "h100-sxm", "frontier"))
LLAMA = model_preset("llama-8b")
MIXTRAL = model_preset("mixtral-8x7b")
UNFUSED, FUSED = (replace(LLAMA, attention=attention) for attention in ("unfused", "fused"))


def terms(
    software: str, model: ModelShape = LLAMA, cluster: Cluster = H100, **knobs: Any
) -> dict[str, float]:
    layout = Layout(**{"precision": "bf16", **knobs})
    found = time_terms(layout, model, cluster, kernels=kernels_of(software, cluster))
    return dict(zip(TERM_NAMES, found.seconds[0].tolist(), strict=True))


def seconds(rates: ProductRates | None, m: float, n: float, k: float) -> float:
    assert rates is not None
    return float(rates.seconds(*(np.array(float(each)) for each in (m, n, k))))


def test_rates_between_the_grid_are_linear_in_the_logarithms() -> None:
    m, n, k = np.meshgrid(*map(np.log2, (M_GRID, NK_GRID, NK_GRID)), indexing="ij")
    rates = ProductRates(20.0 + 0.5 * m + 0.25 * n + 0.125 * k, (1.0, 0.0))
    for shape in ((512, 512, 512), (3000, 1234, 11111), (32768, 51200, 600)):
        speed = 2.0**20 * shape[0] ** 0.5 * shape[1] ** 0.25 * shape[2] ** 0.125
        assert seconds(rates, *shape) == pytest.approx(2.0 * np.prod(shape) / speed)
    # Smaller products are not faster than those at the grid's edge; larger ones have its speed.
    assert seconds(rates, 64, 512, 512) == pytest.approx(seconds(rates, 512, 512, 512))
    larger = seconds(rates, 512, 102400, 512)
    assert larger == pytest.approx(2 * seconds(rates, 512, 51200, 512))


def test_measured_products_are_slow_where_they_are_small_and_fast_where_they_are_large() -> None:
    for cluster in (A100, H100):
        peak, rates = cluster.peak_flops_per_s["bf16"], product_rates(cluster, "bf16")
        shares = [2 * size**3 / seconds(rates, *[size] * 3) / peak for size in (512, 8192)]
        assert shares[0] < 0.3
        assert 0.7 < shares[1] < 1.0


def test_rates_follow_the_stated_peak_and_fp8_is_not_slower_than_bf16() -> None:
    half = replace(
        H100, peak_flops_per_s={name: 0.5 * peak for name, peak in H100.peak_flops_per_s.items()}
    )
    shape = (4096, 6144, 4096)
    bf16 = product_rates(H100, "bf16")
    assert seconds(product_rates(half, "bf16"), *shape) == pytest.approx(2 * seconds(bf16, *shape))
    assert seconds(product_rates(H100, "fp16"), *shape) == pytest.approx(seconds(bf16, *shape))
    fp8 = product_rates(H100, "fp8")
    assert fp8 is not None
    assert bf16 is not None
    assert np.all(fp8.log2_flops_per_s >= bf16.log2_flops_per_s)
    whole, slower = (attention_flops_per_s(each, 128, 4096) for each in (H100, half))
    assert whole is not None
    assert slower == pytest.approx(whole / 2)


def test_narrow_types_have_the_rates_of_their_column() -> None:
    b200, shape = CLUSTER_PRESETS["b200"], (8192, 8192, 8192)
    fp8, mxfp8, nvfp4 = (product_rates(b200, each) for each in ("fp8", "mxfp8", "nvfp4"))
    assert seconds(mxfp8, *shape) == seconds(fp8, *shape) > 1.3 * seconds(nvfp4, *shape)
    assert product_rates(b200, "fp8_block") is None
    block = product_rates(H100, "fp8_block")
    assert 0.5 < seconds(block, *shape) / seconds(product_rates(H100, "bf16"), *shape) < 0.8
    assert product_rates(H100, "mxfp8") is product_rates(H100, "nvfp4") is None


def test_a_layer_on_a_b300_is_near_the_published_one() -> None:
    """Transformer Engine d0067d0d, docs/examples/gemm_profiling, quantised before: milliseconds."""
    b300, tokens = CLUSTER_PRESETS["b300"], 15872
    sides = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
    for precision, published in (("mxfp8", 7.161), ("nvfp4", 3.764)):
        rates = product_rates(b300, precision)
        found = sum(
            seconds(rates, tokens, n, k)
            + seconds(rates, tokens, k, n)
            + seconds(rates, k, n, tokens)
            for k, n in sides
        )
        assert 1e3 * found == pytest.approx(published, rel=0.14)


def test_devices_that_were_not_measured_and_measured_clusters_have_no_rates() -> None:
    measured = replace(H100, source=f"{MEASURED_SOURCE} on a test's machine")
    for cluster in (FRONTIER, measured, replace(H100, device="some accelerator")):
        assert product_rates(cluster, "bf16") is None
        assert attention_flops_per_s(cluster, 128, 4096) is None
        known, unknown = (terms(each, cluster=cluster) for each in ("torchtitan", "a trainer"))
        assert known["matrices"] == unknown["matrices"]
    assert product_rates(H100, "fp32") is None
    assert product_rates(A100, "fp8") is None


def test_attention_is_faster_on_longer_sequences_and_below_the_measured_ones_slower() -> None:
    lengths = (512, 2048, 8192, 16384, 65536)
    rates = [attention_flops_per_s(H100, 128, length) for length in lengths]
    assert rates == sorted(rates, key=float)
    assert rates[0] != rates[1]
    assert rates[-1] == rates[-2]
    assert attention_flops_per_s(H100, 80, 4096) == attention_flops_per_s(H100, 64, 4096)
    assert (flash_2_share(A100), flash_2_share(H100)) == (1.0, 0.56)
    ratio = terms("torchtitan")["attention"] / terms("Megatron-LM")["attention"]
    assert ratio == pytest.approx(1 / 0.56)


def test_a_block_s_products_take_what_their_shapes_take_forward_and_backward() -> None:
    rates, tokens, h, f = product_rates(H100, "bf16"), 8192, 4096, 14336
    per_layer = 0.0
    for inner, columns in ((h, 6144), (h, h), (h, 2 * f), (f, h)):
        per_layer += seconds(rates, tokens, columns, inner)
        per_layer += seconds(rates, tokens, inner, columns) + seconds(rates, inner, columns, tokens)
    found = terms("Megatron-LM")
    assert found["matrices"] == pytest.approx(32 * per_layer)
    # Their traffic is in the measurement; where there is none, it is a term.
    assert found["matrix_bytes"] == 0.0
    assert terms("Megatron-LM", cluster=FRONTIER)["matrix_bytes"] > 0.0
    vocab = 128256
    head = seconds(rates, tokens, vocab, h) + seconds(rates, tokens, h, vocab)
    assert found["head"] == pytest.approx(head + seconds(rates, h, vocab, tokens))


def test_experts_cost_one_product_of_all_their_rows_times_that_of_grouping() -> None:
    rates = product_rates(H100, "bf16")
    assert rates is not None
    slow, half = rates.grouped
    few, many = (float(rates.grouped_slowdown(np.array(rows))) for rows in (half, 1e9))
    assert few == pytest.approx(2 * slow)
    assert many == pytest.approx(slow)
    # Twice as many experts of half the rows: the same products, with fewer rows each.
    spread = replace(MIXTRAL, num_experts=16)
    assert terms("Megatron-LM", spread)["matrices"] > terms("Megatron-LM", MIXTRAL)["matrices"]


def test_stored_scores_are_charged_in_full_and_fused_ones_not_at_all() -> None:
    positions = LLAMA.attention_positions / LLAMA.num_layers
    scores = 32 * 32 * positions * 8192
    moved_s = 3 * 5 * 2 * scores / H100.memory_bandwidth_bytes_per_s
    for software, model, expected in (
        ("Megatron-LM", LLAMA, 0.0),
        ("Megatron-LM", UNFUSED, moved_s),
        ("vTrain", LLAMA, moved_s),
        ("vTrain", FUSED, 0.0),
        ("torchtitan", LLAMA, 0.0),
        ("", LLAMA, 0.0),
        ("a new trainer", FUSED, 0.0),
        ("a new trainer", UNFUSED, moved_s),
    ):
        assert terms(software, model)["attention_bytes"] == pytest.approx(expected), software
    assert 0.04 * moved_s < terms("a new trainer")["attention_bytes"] < 0.2 * moved_s
    selective = terms("Megatron-LM", UNFUSED, recompute="selective")["attention_bytes"]
    assert selective == pytest.approx(4 / 3 * moved_s)


def test_the_part_of_attention_that_is_not_fused_is_shown_only_where_it_is_charged() -> None:
    kernels = kernels_of("Megatron-LM", H100)
    for model, shown in ((LLAMA, False), (FUSED, False), (UNFUSED, True)):
        layout = Layout(precision="bf16")
        parts = [part.name for part in step_time_parts(layout, model, H100, kernels=kernels)]
        assert ("attention_bytes" in parts) is shown


def test_fused_attention_takes_two_and_a_half_passes_backward() -> None:
    rate = attention_flops_per_s(H100, 128, 8192)
    assert rate is not None
    forward = 32 * 2.0 * 8192 * 8192 * 4096 / rate
    for recompute, passes in (("none", 1), ("selective", 2), ("full", 2)):
        found = terms("Megatron-LM", recompute=recompute)["attention"]
        assert found == pytest.approx((passes + 2.5 / 0.86) * forward)


def test_fused_kernels_move_half_of_what_eager_ones_do() -> None:
    fused, eager = (terms(each) for each in ("Megatron-LM", "torchtitan"))
    h, f, q, kv = 4096, 14336, 4096, 1024
    a_token = 20 * h + 8 * f + 4 * (q + kv)
    moved = 32 * 8192 * 2 * a_token / H100.memory_bandwidth_bytes_per_s
    assert fused["elementwise"] == pytest.approx(moved)
    once_more = terms("Megatron-LM", recompute="full")["elementwise"] - fused["elementwise"]
    assert once_more / fused["elementwise"] == pytest.approx(
        (10 * h + 3 * f + 2 * (q + kv)) / a_token
    )
    assert 0.4 < fused["elementwise"] / eager["elementwise"] < 0.6
    assert fused["accumulation"] == pytest.approx(0.3 * eager["accumulation"])


def test_selective_recomputation_by_operator_repeats_key_output_and_up() -> None:
    none, selective = (terms("torchtitan", recompute=each) for each in ("none", "selective"))
    full = terms("torchtitan", recompute="full")
    share = (4096 + 1024 + 14336) / (2 * 4096 + 2 * 1024 + 3 * 14336)
    repeated = (selective["matrices"] - none["matrices"]) / (full["matrices"] - none["matrices"])
    assert repeated == pytest.approx(share)
    assert selective["attention"] == none["attention"]
    assert selective["elementwise"] == pytest.approx(full["elementwise"])
    # Of routed experts it repeats all products, which are one operator each.
    none, selective, full = (
        terms("torchtitan", MIXTRAL, recompute=each)["matrices"]
        for each in ("none", "selective", "full")
    )
    attention, experts = 2 * 4096 + 2 * 1024, 2 * 3 * 14336
    assert selective < full
    assert (selective - none) / (full - none) > experts / (attention + experts)
    megatron = [terms("Megatron-LM", recompute=each) for each in ("none", "selective")]
    assert megatron[0]["matrices"] == megatron[1]["matrices"]
    assert megatron[0]["attention"] < megatron[1]["attention"]


knobs = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 4]),
        "cp_comm_type": st.sampled_from(["p2p", "a2a"]),
        "dp": st.sampled_from([8, 16]),
        "ep": st.sampled_from([1, 4]),
        "etp": st.sampled_from([1, 2]),
        "micro_batch_size": st.integers(1, 3),
        "num_microbatches": st.sampled_from([4, 12]),
        "zero_stage": st.sampled_from([0, 1]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "precision": st.sampled_from(["bf16", "fp8", "fp32"]),
        "schedule": st.sampled_from(["1f1b", "zero_bubble"]),
    }
)


@settings(max_examples=30)
@given(st.lists(knobs, min_size=2, max_size=8), st.sampled_from(["Megatron-LM", "torchtitan"]))
def test_blocks_that_are_computed_once_give_what_each_layout_gives(
    several: list[dict[str, Any]], software: str
) -> None:
    layouts = [Layout(**{"num_nodes": 64, **each}) for each in several]
    kernels = kernels_of(software, H100)
    alone = [step_time_s(each, MIXTRAL, H100, kernels=kernels)[0] for each in layouts]
    columns = LayoutColumns.of_each(layouts)
    together = step_time_s(columns, MIXTRAL, H100, kernels=kernels)
    assert together == pytest.approx(alone, rel=1e-12)
    kept = time_terms(columns, MIXTRAL, H100, kernels=kernels)
    assert kept.step_time_s() == pytest.approx(alone, rel=1e-12)
