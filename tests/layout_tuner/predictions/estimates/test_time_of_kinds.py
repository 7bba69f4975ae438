"""The time of layers of several kinds: what each has, and what knobs do to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from layout_tuner.predictions.estimates.step_time import TERM_NAMES, block_and_head_s, time_terms
from layout_tuner.predictions.estimates.time_terms import (
    CHANNEL_DECAY_RATE,
    STATE_BACKWARD,
    STATE_PEAK_SHARE,
)
from layout_tuner.predictions.estimates.trainer_kernels import ANY_TRAINER, TrainerKernels
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from tests.layout_tuner.predictions.estimates.test_time_estimate import MACHINE

PEAK = 100e12
S = 1024
LLAMA = ModelShape(
    name="llama",
    family="llama",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_heads=16,
    num_kv_heads=16,
    seq_length=S,
    vocab_size=32000,
    tied_embeddings=False,
)
LATENT = replace(
    LLAMA,
    q_lora_rank=384,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
)
MIXTURE = replace(
    LLAMA,
    ffn_hidden_size=512,
    num_experts=8,
    experts_per_token=2,
    moe_ffn_hidden_size=512,
)
STATES: dict[str, dict[str, Any]] = {
    "mamba2": {
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
    },
    "gated_delta_net": {
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "kda": {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
HYBRID = replace(
    MIXTURE,
    activation="relu2",
    layer_kinds=("mamba2", "experts", "full", "experts"),
    **STATES["mamba2"],
)


@pytest.fixture(autouse=True)
def products_of_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout_tuner.predictions.estimates.layer_products._HALF_SPEED", 0.0)


def terms(
    model: ModelShape, kernels: TrainerKernels = ANY_TRAINER, **knobs: Any
) -> dict[str, float]:
    layout = Layout(**{"precision": "bf16", **knobs})
    found = time_terms(layout, model, MACHINE, kernels=kernels).seconds[0]
    return dict(zip(TERM_NAMES, map(float, found), strict=True))


def with_state(mixer: str) -> ModelShape:
    return replace(LLAMA, layer_kinds=(f"{mixer}+dense",), **STATES[mixer])


def test_flops_of_latent_attention_are_those_that_torch_counts() -> None:
    heads, a, r, n, p, v = 16, 384, 128, 64, 32, 64
    x = torch.zeros(S, LATENT.hidden_size, device="meta")

    def weight(inner: int, columns: int) -> torch.Tensor:
        return torch.zeros(columns, inner, device="meta")

    with FlopCounterMode(display=False) as counter:
        q = linear(linear(x, weight(1024, a)), weight(a, heads * (n + p)))
        latent = linear(x, weight(1024, r + p))
        up = linear(latent[:, :r], weight(r, heads * (n + v)))
        keys = torch.cat([up[:, : heads * n], latent[:, r:].repeat(1, heads)], dim=1)
        scores = torch.bmm(
            q.view(S, heads, n + p).transpose(0, 1),
            keys.reshape(S, heads, n + p).permute(1, 2, 0),
        )
        mixed = torch.bmm(scores, up[:, heads * n :].reshape(S, heads, v).transpose(0, 1))
        out = linear(mixed.transpose(0, 1).reshape(S, heads * v), weight(heads * v, 1024))
        inner = linear(out, weight(1024, 4096)) * linear(out, weight(1024, 4096))
        linear(inner, weight(4096, 1024))
    assert counter.get_total_flops() == S * LATENT.forward_flops_of_layer


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        LATENT,
        replace(LATENT, q_lora_rank=0),
        replace(LLAMA, activation="relu2"),
        replace(LLAMA, attention_output_gate=True),
        replace(LLAMA, layer_kinds=("full", "dense")),
        replace(MIXTURE, experts_every=2, ffn_hidden_size=4096),
        replace(MIXTURE, expert_latent_size=256, shared_expert_ffn_hidden_size=512),
        replace(LATENT, num_mtp_layers=2),
        replace(LLAMA, mean_document_length=128),
    ],
)
def test_products_take_the_models_flops(model: ModelShape) -> None:
    found = terms(model)
    flops = model.model_flops_per_token * S
    if model.num_experts:  # routers are not counted
        flops -= 3 * 2 * S * model.hidden_size * model.num_experts * model.num_expert_layers
    total = found["matrices"] + found["attention"] + found["head"]
    assert total == pytest.approx(flops / PEAK)


@pytest.mark.parametrize("mixer", STATES)
def test_a_recurrence_has_a_rate_of_its_own(mixer: str) -> None:
    model = with_state(mixer)
    rate = STATE_PEAK_SHARE * PEAK * (CHANNEL_DECAY_RATE if mixer == "kda" else 1.0)
    once = 8 * S * model.mixer_parts.flops_of_token / rate
    assert terms(model)["attention"] == pytest.approx((1 + STATE_BACKWARD) * once)
    repeated = terms(model, recompute="full")["attention"]
    assert repeated == pytest.approx((2 + STATE_BACKWARD) * once)
    assert terms(model, tp=4)["attention"] == pytest.approx((1 + STATE_BACKWARD) * once / 4)


@pytest.mark.parametrize("knobs", [{}, {"tp": 4, "sequence_parallel": True}, {"ep": 4, "dp": 4}])
def test_terms_of_layers_are_the_means_of_their_kinds(knobs: dict[str, Any]) -> None:
    names = ("matrices", "attention", "elementwise", "kernels", "exchange_inside", "host")
    mixed = terms(HYBRID, **knobs)
    alone = [(terms(each.shape, **knobs), len(each.layers)) for each in HYBRID.kinds]
    for name in names:
        mean = sum(found[name] * layers for found, layers in alone) / HYBRID.num_layers
        assert mixed[name] == pytest.approx(mean), name


def test_tp_leaves_down_projections_whole() -> None:
    whole = LATENT.mixer_parts.num_whole_matrix_parameters
    assert whole == 1024 * (384 + 128 + 32)
    divided = LATENT.num_layer_matrix_parameters - whole
    for sequence_parallel in (False, True):
        found = terms(LATENT, tp=4, sequence_parallel=sequence_parallel)["matrices"]
        share = 4 if sequence_parallel else 1  # each rank takes its own tokens
        flops = 8 * 3 * 2 * S * (divided / 4 + whole / share)
        assert found == pytest.approx(flops / PEAK)


def test_latents_are_gathered_in_place_of_the_stream() -> None:
    one, other = (terms(model, tp=4)["tensor_inside"] for model in (LLAMA, LATENT))
    gathered = 384 + 128 + 32
    ends, sums = 2, 2 * 2 * 8
    saved = 2 * 8 * (1024 - gathered) / (2 * 1024)
    assert other / one == pytest.approx((sums + ends - saved) / (sums + ends))


def test_mla_up_proj_repeats_what_comes_from_latents() -> None:
    ups = 384 * 16 * 96 + 128 * 16 * 128
    more = terms(LATENT, recompute="mla_up_proj")["matrices"] - terms(LATENT)["matrices"]
    assert more == pytest.approx(8 * 2 * S * ups / PEAK)
    assert terms(LLAMA, recompute="mla_up_proj")["matrices"] == terms(LLAMA)["matrices"]


def test_a_depth_of_mtp_is_a_layer_an_output_and_a_projection() -> None:
    plain, deeper = terms(LATENT), terms(replace(LATENT, num_mtp_layers=1))
    for name in ("matrices", "attention", "elementwise", "kernels", "host"):
        assert deeper[name] / plain[name] == pytest.approx(9 / 8), name
    assert deeper["logits"] == pytest.approx(2 * plain["logits"])
    flops = 3 * (2 * LATENT.logit_forward_flops_per_token + 4 * 1024**2)
    assert deeper["head"] == pytest.approx(flops * S / PEAK)


def test_mtp_makes_the_last_stage_heavy() -> None:
    knobs = {"pp": 4, "num_microbatches": 16}
    waits = [terms(replace(LATENT, num_mtp_layers=depths), **knobs) for depths in (0, 1)]
    plain, deeper = (each["imbalance"] + each["equal_layers"] for each in waits)
    assert deeper > plain * 1.5


def test_mtp_adds_its_parameters_to_the_reduction() -> None:
    depth = replace(LATENT, num_mtp_layers=1)
    plain, deeper = (terms(model, dp=4)["accumulation"] for model in (LATENT, depth))
    assert deeper / plain == pytest.approx(depth.num_parameters / LATENT.num_parameters)


def test_latent_experts_exchange_rows_of_their_latent() -> None:
    narrow = replace(MIXTURE, expert_latent_size=256)
    one, other = (terms(model, ep=4, dp=4)["exchange_inside"] for model in (MIXTURE, narrow))
    assert other / one == pytest.approx(256 / 1024)


def test_a_parallel_block_sums_once() -> None:
    parallel = replace(LLAMA, parallel_block=True)
    one, other = (terms(model, tp=4)["tensor_inside"] for model in (LLAMA, parallel))
    assert other / one == pytest.approx((2 * 8 + 2) / (4 * 8 + 2))


def test_a_layer_of_one_sublayer_has_half_the_sums_and_norms() -> None:
    halves = replace(LLAMA, num_layers=16, layer_kinds=("full", "dense"))
    for name in ("tensor_inside", "latency_inside", "elementwise", "kernels", "host"):
        found, usual = terms(halves, tp=4)[name], terms(LLAMA, tp=4)[name]
        assert found == pytest.approx(usual), name


def test_documents_bound_attention() -> None:
    packed = replace(LLAMA, mean_document_length=128)
    assert terms(packed)["attention"] == pytest.approx(terms(LLAMA)["attention"] * 128 / S)
    assert terms(packed)["matrices"] == terms(LLAMA)["matrices"]


def test_flash_2_pads_values_to_the_width_of_keys() -> None:
    pads = TrainerKernels(uses_flash_2=True)
    found = terms(LATENT, pads)["attention"] / terms(LATENT)["attention"]
    assert found == pytest.approx(2 * 96 / (96 + 64))
    assert terms(LLAMA, pads)["attention"] == terms(LLAMA)["attention"]


def test_attention_takes_the_rate_of_its_mean_width() -> None:
    kernels = TrainerKernels(uses_measured_rates=True)
    layout = Layout(precision="bf16")
    place = TERM_NAMES.index("attention")
    cluster = CLUSTER_PRESETS["h100-sxm"]

    def seconds(model: ModelShape) -> float:
        return float(time_terms(layout, model, cluster, kernels=kernels).seconds[0, place])

    heads = replace(LLAMA, head_dim=160)
    latent = replace(LATENT, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert seconds(latent) == pytest.approx(seconds(heads))


def test_a_recurrence_exchanges_heads_over_cp_whatever_attention_does() -> None:
    model = with_state("mamba2")
    kinds = ("all_gather", "p2p", "a2a")
    found = {terms(model, cp=2, cp_comm_type=kind)["context"] for kind in kinds[::2]}
    assert len(found) == 1
    wide = model.mixer_parts.matrices[0].columns + model.mamba_size
    sent = wide * S / 2 / 2 * 2 * 2  # half of the tokens, of which half leave, twice, in 2 bytes
    assert min(found) > 8 * sent / 50e9
    assert min(found) < 8 * sent / 50e9 + 8 * 4 * 5e-5


def test_values_narrower_than_keys_are_less_to_gather() -> None:
    narrow = replace(LATENT, v_head_dim=32)
    usual, less = (terms(model, cp=2)["context"] for model in (LATENT, narrow))
    assert less < usual


def test_the_slowest_of_unlike_stages_is_waited_for() -> None:
    heavy, light = ("full+experts",) * 4, ("full+dense",) * 4
    model = replace(MIXTURE, ffn_hidden_size=64, layer_kinds=(*heavy, *light))
    knobs: dict[str, Any] = {"pp": 2, "num_microbatches": 9}
    layout = Layout(precision="bf16", **knobs)
    layer_s = [block_and_head_s(layout, each.shape, MACHINE)[0] for each in model.kinds]
    head_s = block_and_head_s(layout, model, MACHINE)[1]
    even = (4 * sum(layer_s) + head_s) / 2
    for text, slowest in (
        ("Et*4|t*4L", max(4 * layer_s[0], 4 * layer_s[1] + head_s)),
        ("Et*3|t*5L", max(3 * layer_s[0], layer_s[0] + 4 * layer_s[1] + head_s)),
    ):
        found = terms(model, pipeline_layout=text, **knobs)
        assert found["imbalance"] == pytest.approx(8 * max(slowest - even, 0.0))
        assert found["equal_layers"] == 0.0
    assert (
        terms(model, **knobs)["imbalance"]
        == terms(model, pipeline_layout="Et*4|t*4L", **knobs)["imbalance"]
    )


def test_interleaving_evens_unlike_stages() -> None:
    kinds = ("full+experts",) * 4 + ("full+dense",) * 4
    model = replace(MIXTURE, ffn_hidden_size=64, vocab_size=64, layer_kinds=kinds)
    waits = [terms(model, pp=2, vpp=v, num_microbatches=8)["imbalance"] for v in (1, 2, 4)]
    assert waits[0] > 0
    assert waits[1] == pytest.approx(waits[2])
    assert waits[1] < waits[0] / 10
