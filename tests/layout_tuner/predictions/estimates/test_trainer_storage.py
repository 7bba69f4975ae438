"""What named trainers keep, by differences of two layouts, models or trainers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.estimates.peak_memory import StageMemory, stage_memory
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.estimates.trainer_storage import storage_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

H100 = CLUSTER_PRESETS["h100-sxm"]
GPT, LLAMA = model_preset("gpt-22b"), model_preset("llama-8b")
GIB = 1 << 30


def stages(
    layout: Layout, model: ModelShape = GPT, software: str = "megatron-lm"
) -> list[StageMemory]:
    return stage_memory(layout, model, storage_of(software, H100))


def kept(layout: Layout, software: str = "megatron-lm", **changes: Any) -> float:
    """Bytes of activations that the first stage keeps."""
    return stages(layout, replace(GPT, **changes), software)[0].activations_bytes


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(
    ("precision", "dropout", "bytes_a_score"),
    [("bf16", 0.0, 2), ("fp16", 0.1, 5), ("fp8", 0.1, 5), ("fp32", 0.0, 4), ("fp32", 0.1, 9)],
)
def test_unfused_attention_keeps_each_score_and_dropout_its_mask_and_what_is_left(
    tp: int, precision: Any, dropout: float, bytes_a_score: int
) -> None:
    # arXiv:2205.05198, equation 2: 5 a s^2 b / t bytes a layer at 16 bits.
    layout = Layout(tp=tp, micro_batch_size=4, precision=precision)
    scores = GPT.num_heads * GPT.seq_length**2 * 4 / tp
    fused, unfused = (
        kept(layout, attention=attention, attention_dropout=dropout)
        for attention in ("fused", "unfused")
    )
    assert unfused - fused == pytest.approx(bytes_a_score * scores * GPT.num_layers)
    # Fused attention draws its mask again.
    assert fused == kept(layout, attention="fused")
    # Selective recomputation keeps no score, and has those of one layer in its backward pass.
    selective = replace(layout, recompute="selective")
    model = replace(GPT, attention="unfused", attention_dropout=dropout)
    (some,), (every,) = stages(selective, model), stages(layout, model)
    assert some.activations_bytes == pytest.approx(fused)
    assert some.backward_bytes - every.backward_bytes == pytest.approx(bytes_a_score * scores)


@pytest.mark.parametrize(("sequence_parallel", "parts"), [(False, 1), (True, 8)])
def test_dropout_before_residual_sums_keeps_two_masks_of_a_byte(
    sequence_parallel: bool, parts: int
) -> None:
    layout = Layout(tp=8, sequence_parallel=sequence_parallel, precision="bf16")
    masks = 2 * GPT.seq_length * GPT.hidden_size / parts * GPT.num_layers
    assert kept(layout, hidden_dropout=0.1) - kept(layout) == pytest.approx(masks)


def test_the_trainer_says_whether_attention_is_fused_unless_the_model_does() -> None:
    layout = Layout(micro_batch_size=2, precision="bf16")
    fused, unfused = (kept(layout, attention=each) for each in ("fused", "unfused"))
    for software in ("megatron-lm", "Megatron-DeepSpeed", "simulated stress-22b"):
        assert kept(layout, software) == fused
    assert kept(layout, "vTrain MICRO24") == unfused
    assert kept(layout, "vTrain MICRO24", attention="fused") == fused
    # Of an unknown trainer only one of its hypotheses is left.
    memory = TrainerMemory.prior(H100, software="a new trainer")
    spreads = [
        memory.peak_bytes(layout, replace(GPT, attention=attention))[1].item()
        for attention in ("fused", None)
    ]
    assert spreads[0] < spreads[1]


def test_a_gpt_on_one_v100_does_not_fit_with_unfused_attention_and_dropout() -> None:
    # As a run of 774M parameters that ran out of memory with 29.6 GiB allocated.
    model = ModelShape(
        name="gpt-774m",
        family="gpt",
        num_layers=36,
        hidden_size=1280,
        ffn_hidden_size=5120,
        num_heads=20,
        num_kv_heads=20,
        seq_length=1024,
        vocab_size=50304,
        tied_embeddings=True,
    )
    one, ampere = CLUSTER_PRESETS["v100"], CLUSTER_PRESETS["a100-sxm"]
    layout = LayoutColumns.of(Layout(micro_batch_size=4, num_microbatches=4, precision="fp16"))

    def fits(cluster: Cluster = one, **changes: Any) -> float:
        memory = TrainerMemory.prior(cluster, software="megatron-lm")
        return memory.fits(layout, replace(model, **changes), 32.0 * GIB).item()

    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    assert fits(attention="unfused", **dropout) < 0.5
    # Megatron-LM's own default is 0.1.
    assert fits() == fits(attention_dropout=0.1) < 0.5 < 0.9 < fits(attention_dropout=0)
    # Transformer Engine fuses attention on newer devices alone.
    assert fits(**dropout) == fits(attention="unfused", **dropout)
    assert fits(ampere, **dropout) == fits(ampere, attention="fused", **dropout) > 0.9
    traffic = [kernels_of("megatron-lm", each).traffic_of(model) for each in (one, ampere)]
    assert traffic == [1, 0]


def test_the_loss_of_megatron_lm_makes_one_fp32_copy_of_the_logits() -> None:
    layout = Layout(tp=2, pp=2, micro_batch_size=3, num_microbatches=2, precision="bf16")
    logits = LLAMA.seq_length * 3 * LLAMA.vocab_size / 2
    copies = {
        software: stages(layout, LLAMA, software)[-1].head_bytes / (4 * logits)
        for software in ("megatron-lm", "megatron-bridge", "Megatron-DeepSpeed", "torchtitan")
    }
    one = copies["megatron-lm"]
    assert 1.5 < one < 1.6  # beside them in 16 bits, and the inputs of norm and projection
    assert copies["megatron-bridge"] == one
    assert copies["Megatron-DeepSpeed"] - one == pytest.approx(1)
    assert copies["torchtitan"] - one == pytest.approx(2)
    assert stages(layout, LLAMA)[0].workspace_bytes == 64 << 20
    # The loss of torchtitan 0.3 has an eighth of them at a time, and the gradient of its input.
    whole, chunked = (
        stages(layout, LLAMA, software)[-1].head_bytes
        for software in ("torchtitan", "torchtitan-0.3")
    )
    tokens = LLAMA.seq_length * 3
    beside = tokens * LLAMA.hidden_size * (2 + 4)
    assert whole - chunked == pytest.approx(14 * logits * 7 / 8 - beside)


def test_megatron_lm_keeps_three_widths_of_swiglu_and_its_code_of_2022_four() -> None:
    layout = Layout(precision="bf16")
    for software, widths in (("megatron-lm", 3), ("Megatron-DeepSpeed", 4)):
        (one,), (more,) = (
            stages(layout, replace(LLAMA, ffn_hidden_size=width), software)
            for width in (14336, 14336 + 1024)
        )
        added = more.activations_bytes - one.activations_bytes
        tokens = LLAMA.seq_length * LLAMA.num_layers
        assert added == pytest.approx(2 * tokens * widths * 1024)


@pytest.mark.parametrize(
    ("changes", "is_sharded"),
    [
        ({}, True),
        ({"precision": "fp16"}, False),
        # Without a pipeline its export takes another optimizer, which keeps all states.
        ({"pp": 1, "dp": 8}, False),
        ({"zero_stage": 1}, True),
    ],
)
def test_megatron_deepspeed_shards_the_states_of_a_bf16_pipeline_without_zero(
    changes: dict[str, Any], is_sharded: bool
) -> None:
    layout = Layout(pp=2, dp=4, num_microbatches=2, precision="bf16")
    layout = replace(layout, **changes)
    for software, shards in (
        ("Megatron-DeepSpeed", is_sharded),
        ("megatron-lm", layout.zero_stage == 1),
    ):
        first = stages(layout, LLAMA, software)[0]
        parameters = first.weights_bytes / 2
        share = 12 * parameters / (layout.dp if shards else 1)
        assert first.optimizer_bytes == pytest.approx(share)


def test_torchtitan_keeps_every_second_product_with_selective_recomputation() -> None:
    layout = Layout(dp=8, zero_stage=3, precision="bf16", recompute="selective")
    h, f, kv = LLAMA.hidden_size, LLAMA.ffn_hidden_size, LLAMA.kv_hidden_size
    # The block's input; query, value, attention's output, gate, and the block's output.
    elements = h + h + kv + h + f + h
    tokens = LLAMA.seq_length * LLAMA.num_layers
    (some,), (none,) = (
        stages(replace(layout, recompute=recompute), LLAMA, "torchtitan")
        for recompute in ("selective", "none")
    )
    assert some.activations_bytes == pytest.approx(2 * tokens * elements)
    # A layer's backward pass has the others again.
    again = (none.activations_bytes - some.activations_bytes) / LLAMA.num_layers
    assert some.backward_bytes - none.backward_bytes == pytest.approx(again)
    # The scattered sums of tensor parallelism, and the down product before its sum.
    tensor = replace(layout, tp=8, dp=1, sequence_parallel=True)
    (cut,) = stages(tensor, LLAMA, "torchtitan")
    elements = 3 * h / 8 + (2 * h + kv + f) / 8 + h
    assert cut.activations_bytes == pytest.approx(2 * tokens * elements)


def test_torchtitan_leaves_weights_and_gradients_whole_beside_a_pipeline() -> None:
    model = model_preset("llama-70b")
    layout = Layout(tp=8, pp=8, dp=8, num_microbatches=8, zero_stage=2, precision="bf16")
    parameters = stages(replace(layout, zero_stage=0), model)[3].weights_bytes / 2
    for zero in (2, 3):
        stage = stages(replace(layout, zero_stage=zero), model, "torchtitan")[3]
        # Whole in bf16 and fp32, and the shares of 4 bytes of gradient and 12 of states.
        sharded = stage.optimizer_bytes
        assert sharded == pytest.approx(12 * parameters / 8)
        assert stage.weights_bytes + stage.gradients_bytes >= 6 * parameters
        assert stage.weights_bytes == pytest.approx(2 * parameters), "its shard is the master"
        assert stage.gradients_bytes == pytest.approx(4 * parameters * (1 + 1 / 8))
    # Without a pipeline only two layers are whole at a time, and nothing where no rank shares.
    alone = replace(layout, pp=1, dp=64, zero_stage=3)
    assert stages(alone, model, "torchtitan")[0].gradients_bytes < 4 * parameters
    single = stages(replace(layout, dp=1), model, "torchtitan")[3]
    assert single.gradients_bytes == pytest.approx(4 * parameters)
