"""Random jobs that are legal and that the adapter of a trainer does not refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from hypothesis import assume
from hypothesis import strategies as st

from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import (
    CP_COMM_TYPES,
    PIPELINE_SPLITS,
    RANK_ORDERS,
    SCHEDULES,
    ZERO_STAGES,
    Layout,
)
from layout_tuner.search_spaces.layouts.pipeline_layout import SPLIT, layout_text, stage_layers
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES, violations
from layout_tuner.search_spaces.models.layer_kinds import (
    read_layer_kinds,
    repeated,
    write_layer_kinds,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.knob_settings import settings_in_effect
from layout_tuner.trainers.registry import ADAPTERS

SCOPES: Final = OTHER_TRAINER_SCOPES - {"machine"}
CLUSTER: Final = CLUSTER_PRESETS["frontier"]

CHOICES: Final[dict[str, Sequence[Any]]] = {
    "family": ("gpt", "llama", "llama"),
    "experts": (False, False, True),
    "head_dim": (None, None, 48),
    "kinds": ("", "", "fields", "latent", "delta", "hybrid"),
    "tp": (1, 2, 4),
    "tp_columns": (1,),
    "pp": (1, 2, 3, 4),
    "cp": (1, 1, 2),
    "dp": (1, 2, 3, 4, 8),
    "precision": ("fp32", "bf16", "bf16", "fp16"),
    "attention": (None, "fused", "unfused"),
    "dropout": (0.0, 0.1),
}
"""The values that a job has in equal parts; the others follow from them."""

PLAIN: Final[dict[str, Sequence[Any]]] = {"kinds": ("",)}
FUSED: Final[dict[str, Sequence[Any]]] = {
    **PLAIN,
    "attention": (None, "fused"),
    "dropout": (0.0,),
}

NARROWED: Final[dict[str, dict[str, Sequence[Any]]]] = {
    "deepspeed": {"cp": (1,)},
    "megatron-deepspeed": {**PLAIN, "experts": (False,), "head_dim": (None,), "cp": (1,)},
    "megatron-bridge": {"attention": (None, "fused")},
    "nanotron": {
        **FUSED,
        "family": ("llama",),
        "experts": (False,),
        "cp": (1,),
        "precision": ("bf16",),
    },
    "torchtitan-0.2": {**FUSED, "family": ("llama",), "experts": (False,), "head_dim": (None,)},
    "torchtitan-0.3": {**FUSED, "family": ("llama",), "experts": (False,), "head_dim": (None,)},
    "accelerate": FUSED,
    "axonn": {
        **FUSED,
        "experts": (False,),
        "head_dim": (None,),
        "tp_columns": (1, 2),
        "pp": (1,),
        "cp": (1,),
    },
}
"""What a trainer's adapter refuses nearly always is not tried."""


@st.composite
def legal_jobs(draw: Callable[[st.SearchStrategy[Any]], Any], name: str) -> TrainerJob:
    """A job as it is exported: without the knobs that the trainer lacks."""
    chosen = {**CHOICES, **NARROWED.get(name, {})}
    degree = {knob: draw(st.sampled_from(values)) for knob, values in chosen.items()}

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    layout = _layout(pick, degree)
    model = _model(pick, layout, degree)
    assume(not violations(layout, model, CLUSTER, scopes=SCOPES))
    adapter = ADAPTERS[name]
    job = TrainerJob(
        model=model, layout=layout, compile=pick(False, True), balanced_routing=pick(False, True)
    )
    job = job.without(adapter.all_lacking(job))
    assume(not violations(job.layout, model, CLUSTER, scopes=SCOPES))
    assume(not adapter.refusals(job))
    return job


def _layout(pick: Callable[..., Any], degree: dict[str, Any]) -> Layout:
    tp, pp, cp, dp = (degree[knob] for knob in ("tp", "pp", "cp", "dp"))
    ranks = tp * cp * dp
    ep = etp = 1
    if degree["experts"] and degree["family"] == "llama":
        ep = pick(*(each for each in (1, 2, 4) if ranks % each == 0))
        etp = pick(*(each for each in (1, 1, 2) if ranks % (each * ep) == 0))
    schedule = pick(*SCHEDULES) if pp > 1 else "1f1b"
    vpp = 2 if schedule in V_SLOTS else pick(1, 2) if pp > 1 and schedule == "1f1b" else 1
    stages = layout_text([pick(1, 2, 3) for _ in range(pp * vpp)])
    written = pick(SPLIT, SPLIT, stages) if pp > 1 else SPLIT
    zero_stage = pick(*ZERO_STAGES) if dp * cp > 1 else 0
    copies = [each for each in (1, 1, 2, 4) if dp * cp % each == 0 and each < dp * cp]
    is_shared = tp > 1 and (ep * etp > 1 or degree["experts"] or pick(False, True))
    return Layout(
        num_nodes=pick(*(nodes for nodes in (1, 2) if ranks * pp % nodes == 0)),
        **{knob: degree[knob] for knob in ("tp", "tp_columns", "pp", "cp", "dp", "precision")},
        ep=ep,
        etp=etp,
        vpp=vpp,
        schedule=schedule,
        micro_batch_size=pick(1, 2, 3),
        num_microbatches=pick(1, 2, 3, 4, 5, 8) * (pp if vpp > 1 else 1),
        zero_stage=zero_stage,
        zero_replicas=pick(*copies) if zero_stage else 1,
        recompute=pick(*RECOMPUTE_MODES),
        sequence_parallel=is_shared,
        pipeline_split=pick(*PIPELINE_SPLITS) if pp > 1 and written == SPLIT else "layers",
        pipeline_layout=written,
        cp_comm_type=pick(*CP_COMM_TYPES) if cp > 1 else "all_gather",
        rank_order=pick(*RANK_ORDERS) if pp > 1 and dp > 1 else RANK_ORDERS[0],
    )


def _model(pick: Callable[..., Any], layout: Layout, degree: dict[str, Any]) -> ModelShape:
    tp, cp = layout.tp, layout.cp
    is_llama = degree["family"] == "llama"
    kv_heads = tp * cp * pick(1, 2)
    heads = kv_heads * (pick(1, 2, 3) if is_llama else 1)
    counted_ends = sum(layout.counted_ends)
    num_layers = max(layout.pp * layout.vpp * pick(1, 2, 5) - counted_ends, 1)
    if layout.is_written_out:
        num_layers = sum(stage_layers(layout.pipeline_layout))
    shape: dict[str, Any] = {
        "name": "random",
        "family": degree["family"],
        "num_layers": num_layers,
        "hidden_size": heads * layout.tp_columns * pick(16, 64),
        "ffn_hidden_size": tp * layout.tp_columns * pick(24, 99, 688),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "seq_length": tp * (2 * cp if cp > 1 else 1) * pick(1, 9, 64, 250),
        "vocab_size": layout.tp_ranks * pick(125, 4000, 32064),
        "tied_embeddings": pick(False, True),
        "attention": degree["attention"],
        "attention_dropout": degree["dropout"],
        "hidden_dropout": 2 * degree["dropout"],
    }
    if not is_llama:
        return ModelShape(**shape)
    if degree["head_dim"]:
        shape |= {"head_dim": degree["head_dim"], "qk_norm": pick(False, True)}
        shape |= pick(
            {}, {"attention_window": 16}, {"attention_window": 9, "full_attention_every": 2}
        )
    if degree["experts"]:
        experts = layout.ep * pick(1, 2, 4)
        shape |= {
            "num_experts": experts,
            "experts_per_token": pick(*sorted({1, min(2, experts), experts})),
            "moe_ffn_hidden_size": layout.etp * pick(24, 99),
            **pick({}, {"shared_expert_ffn_hidden_size": tp * 24}),
        }
        if shape["num_layers"] > 1 and pick(False, True):
            shape["num_dense_layers"] = 1
        else:
            del shape["ffn_hidden_size"]
    if degree["kinds"]:
        shape |= _later_fields(pick, layout, shape)
        shape |= _of_kinds(pick, degree["kinds"], tp * cp, shape)
    return ModelShape.from_mapping({name: each for name, each in shape.items() if each != ""})


def _later_fields(pick: Callable[..., Any], layout: Layout, shape: dict[str, Any]) -> Any:
    """Feed-forwards, norms, biases, positions, predictions and routing."""
    fields: dict[str, Any] = {
        "activation": pick("", "swiglu", "gelu", "relu2"),
        "norm": pick("", "layer", "rms"),
        "biases": pick("", "qkv", "all") if layout.etp == 1 else "",
        "rotary_fraction": pick(1.0, 0.5, 0.0),
        "num_mtp_layers": pick(0, 0, 1, 2),
        "attention_sinks": pick(False, True),
        "attention_output_gate": pick(False, True),
    }
    experts = shape.get("num_experts", 0)
    if experts:
        score = pick("softmax", "sigmoid")
        shared = shape.get("shared_expert_ffn_hidden_size", 0)
        fields |= {
            "router_score": score,
            "router_bias": score == "sigmoid" and pick(False, True),
            "router_scaling_factor": pick(1.0, 2.5),
            "expert_latent_size": pick(0, 16),
            "shared_expert_gate": shared > 0 and pick(False, True),
        }
        if experts % 2 == 0:
            least = 1 if 2 * shape["experts_per_token"] <= experts else 2
            fields |= pick({}, {"router_groups": 2, "router_topk_groups": pick(least, 2)})
    return fields


def _of_kinds(pick: Callable[..., Any], kinds: str, ranks: int, shape: dict[str, Any]) -> Any:
    """Latent attention, or a list of kinds of layers, whose heads `ranks` divide."""
    inner = "experts" if shape.get("num_experts") else "dense"
    nothing = dict.fromkeys(
        ("head_dim", "qk_norm", "attention_window", "full_attention_every", "num_dense_layers"), ""
    )
    if kinds == "latent":
        none = dict.fromkeys(("rotary_fraction", "biases", "attention_output_gate"), "")
        widths = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        latents = {"q_lora_rank": pick(0, 48), "kv_lora_rank": 32, "attention_sinks": ""}
        heads = {"num_kv_heads": shape["num_heads"]}
        dense = {"num_dense_layers": shape.get("num_dense_layers", 0)}
        return {**nothing, **dense, **none, **widths, **latents, **heads}
    if shape["num_layers"] < 3:  # a pattern may then lack experts
        return {}
    if kinds == "delta":
        nets = {"linear_key_head_dim": 32, "linear_value_head_dim": 16}
        nets |= {"linear_num_key_heads": ranks, "linear_num_value_heads": ranks * pick(1, 2)}
        layers = pick(
            [{f"gated_delta_net+{inner}": 3}, f"full+{inner}"],
            [f"full+{inner}", f"gated_delta_net+{inner}"],
        )
        return {**nothing, **nets, "layer_kinds": _whole(layers, shape), **_width(inner)}
    if kinds == "hybrid":
        states = {"mamba_num_heads": 4 * ranks, "mamba_num_groups": ranks}
        states |= {"mamba_head_dim": 64, "mamba_state_dim": 16}
        # Layers of two sublayers become two of Megatron's: `test_layers_of_kinds` has those.
        layers = pick(["mamba2", inner, "full"], [inner, "mamba2", "mamba2", "full"])
        return {**nothing, **states, "layer_kinds": _whole(layers, shape), **_width(inner)}
    return {}


def _whole(pattern: list[Any], shape: dict[str, Any]) -> list[Any]:
    """A kind for each layer: the pattern as often as it takes, and cut at the end."""
    kinds = read_layer_kinds(pattern)
    assert not isinstance(kinds, str)
    return write_layer_kinds(repeated(kinds, shape["num_layers"]))


def _width(inner: str) -> dict[str, Any]:
    """Without dense layers their width is left out."""
    return {"ffn_hidden_size": ""} if inner == "experts" else {}


LAYOUT_SAYS = {"moment_dtype"}
"""Job knobs of campaigns before the layout had them: read back, they are layout fields."""


@st.composite
def legal_jobs_with_settings(
    draw: Callable[[st.SearchStrategy[Any]], Any], name: str
) -> TrainerJob:
    """The same with random job knobs of the trainer's catalogue."""
    job, adapter = draw(legal_jobs(name)), ADAPTERS[name]
    drawn = {
        knob_name: value
        for knob_name, knob in adapter.job_knobs.items()
        if knob_name not in LAYOUT_SAYS
        and not knob.is_default(value := draw(st.sampled_from(knob.every_value)))
    }
    kept = settings_in_effect(drawn, adapter.knobs, job.layout, job.model)
    return replace(job, layout=replace(job.layout, job=JobSettings(kept)))
