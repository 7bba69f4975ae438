"""Megatron-Bridge's training of a recipe, with overrides of its `ConfigContainer`.

The keys are fields of the configurations in `megatron/bridge/training/config.py`, of
`GPTModelProvider`, and of megatron-core's `TransformerConfig` and `DistributedDataParallelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, Layout, Precision
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import (
    INITIAL_LOSS_SCALE,
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    overrides,
    shape_rules,
)
from layout_tuner.trainers.knobs.megatron import MEGATRON_BRIDGE_KNOBS
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.megatron_lm import (
    ARGUMENT_RULES,
    FSDP_CHECKPOINTS,
    INIT_STD,
    NORM_EPSILON,
    SHARDING_STRATEGIES,
    STEP_LINES,
    notes,
    offloaded_layers,
    position_type,
    recompute_method,
    recompute_modules,
)
from layout_tuner.trainers.shapes import core_fields

RECIPE: Final = "vanilla_gpt_pretrain_config"
"""The recipe without assumptions about the model, and with mock data; all its layers are alike."""


def recipe_of(model: ModelShape) -> str:
    """The recipe whose provider has such layers."""
    has_both = 0 < model.num_expert_layers < model.num_layers
    recipes = {
        "nemotronh_4b": core_fields.is_hybrid(model),
        "qwen3_next_80b_a3b": model.linear_num_key_heads,
        "deepseek_v2_lite": model.kv_lora_rank,
        "glm45_air_106b": has_both,  # a specification of each layer
    }
    return next((f"{name}_pretrain_config" for name, has in recipes.items() if has), RECIPE)


_NOT_OF_THE_RECIPE: Final[Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            *("num_moe_experts", "kv_channels", "mtp_num_layers", "pipeline_model_parallel_layout"),
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor"),
            *("moe_router_num_groups", "moe_router_group_topk", "moe_latent_size", "window_size"),
            "experimental_attention_variant",
        )
    ),
    **dict.fromkeys(
        (
            *("qk_layernorm", "add_qkv_bias", "attention_output_gate", "moe_shared_expert_gate"),
            *("moe_router_pre_softmax", "moe_router_enable_expert_bias", "first_last_layers_bf16"),
            *("layernorm_zero_centered_gamma", "moe_shared_expert_overlap"),
        ),
        False,
    ),
    "moe_router_score_function": "softmax",
    "moe_layer_freq": 1,
    "rotary_percent": 1.0,
}
"""Fields that a recipe's own model sets, as a model without them has them."""

LAYOUT_KEYS: Final[Mapping[str, str]] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "zero_replicas": "num_distributed_optimizer_instances",
}
"""The settings that state one field of a layout each; `found_jobs.recipes` reads them."""
SIZE_KEYS: Final[Mapping[str, str]] = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_query_groups",
    "seq_length": "seq_length",
    "vocab_size": "vocab_size",
}
"""Those of a model's sizes."""
MIXED_PRECISION: Final[Mapping[Precision, str | None]] = {
    "fp32": None,
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp8_block": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


_NEMO: Final = StepPattern(
    source="NeMo 2",
    pattern=(
        r"Training epoch \d+, iteration (?P<index>\d+)/\d+ \|.*?\| reduced_train_loss: "
        r"(?P<loss>[^ |]+) \|.*?train_step_timing in s: (?P<step_time_s>[\d.]+)"
    ),
)
"""Of the trainer before Megatron-Bridge; all of its figures are means since the line before."""


def _values(job: TrainerJob) -> Mapping[str, Any]:
    layout, model = job.layout, job.model
    has_zero = layout.zero_stage > 0
    strategy = SHARDING_STRATEGIES.get(layout.zero_stage)
    fsdp = {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": strategy,
        "average_in_collective": False,
    }
    distributed = {"use_megatron_fsdp": True} if strategy else {}
    if layout.rank_order == "tp_cp_pp_dp":
        distributed["use_tp_pp_dp_mapping"] = True
    return {
        "model": {
            **({} if recipe_of(model) == RECIPE else _NOT_OF_THE_RECIPE),
            **_model(model),
            **core_fields.expert_values(job),
            **_parallelism(job),
            **_activation_offload(job),
        },
        "train": {
            "train_iters": 100,
            **_stated(layout, "micro_batch_size", "global_batch_size"),
        },
        "ddp": {
            "use_distributed_optimizer": has_zero,
            "overlap_grad_reduce": has_zero,
            "overlap_param_gather": has_zero,
            **_stated(layout, "zero_replicas"),
            **(fsdp if strategy else {}),
        },
        **({"dist": distributed} if distributed else {}),
        **({"checkpoint": {"ckpt_format": FSDP_CHECKPOINTS}} if strategy else {}),
        "optimizer": {"use_distributed_optimizer": has_zero, **_optimizer_offload(layout)},
        "dataset": {"seq_length": model.seq_length},
        "tokenizer": {"vocab_size": model.vocab_size},
        "mixed_precision": MIXED_PRECISION[layout.precision],
        "rng": {"seed": job.seed + 1},
        "logger": {"log_interval": 1},
    }


def _model(model: ModelShape) -> dict[str, Any]:
    positions = position_type(model)
    values: dict[str, Any] = {
        **{key: getattr(model, name) for name, key in SIZE_KEYS.items()},
        "should_pad_vocab": False,
        "share_embeddings_and_output_weights": model.tied_embeddings,
        "normalization": "LayerNorm" if model.has_layer_norms else "RMSNorm",
        "layernorm_epsilon": NORM_EPSILON,
        "init_method_std": INIT_STD,
        "attention_dropout": model.attention_dropout or 0.0,
        "hidden_dropout": model.hidden_dropout,
        "add_bias_linear": model.biases_of == "all",
        "gated_linear_unit": model.is_gated,
        "activation_func": _ACTIVATIONS[model.activation_of],
        "position_embedding_type": positions,
    }
    if positions == "rope":
        values["rotary_base"] = int(model.rotary_base)
    if model.activation_of == "relu2":
        values["bias_activation_fusion"] = False  # for others alone
    if core_fields.is_hybrid(model):
        values["num_layers"] = len(core_fields.letters_of(model.kind_of_layers))
    return values | core_fields.attention_values(model)


_ACTIVATIONS: Final = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu", "relu2": "squared_relu"}


def _stated(layout: Layout, *names: str) -> dict[str, Any]:
    return {LAYOUT_KEYS[name]: getattr(layout, name) for name in names}


def _optimizer_offload(layout: Layout) -> dict[str, Any]:
    if layout.offload != "optimizer":
        return {}
    names = ("optimizer_cpu_offload", "use_precision_aware_optimizer")
    return {**dict.fromkeys(names, True), "optimizer_offload_fraction": 1.0}


def _activation_offload(job: TrainerJob) -> dict[str, Any]:
    layers = offloaded_layers(job)
    return {"cpu_offloading": True, "cpu_offloading_num_layers": layers} if layers else {}


def _parallelism(job: TrainerJob) -> dict[str, Any]:
    layout, model = job.layout, job.model
    method, number = recompute_method(layout) if layout.recompute == "full" else (None, None)
    granularity = "selective" if layout.recompute not in ("none", "full") else layout.recompute
    modules = {"recompute_modules": recompute_modules(layout)}
    has_pattern = core_fields.is_hybrid(model)
    written = {"pipeline_model_parallel_layout": core_fields.stages_text(layout, model)}
    pattern = {
        "is_hybrid_model": True,
        "hybrid_layer_pattern": core_fields.hybrid_pattern(layout, model),
    }
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    counted = zip(names, layout.counted_ends, strict=True)
    context = {**_stated(layout, "cp"), "cp_comm_type": layout.cp_comm_type}
    return {
        **{name: True for name, counts in counted if counts and not has_pattern},
        **({} if layout.cp == 1 else context),
        **_stated(layout, "tp", "pp"),
        LAYOUT_KEYS["vpp"]: layout.vpp if layout.vpp > 1 else None,
        **(written if layout.is_written_out and not has_pattern else {}),
        **(pattern if has_pattern else {}),
        **_stated(layout, "sequence_parallel"),
        "recompute_granularity": None if granularity == "none" else granularity,
        "recompute_method": method,
        "recompute_num_layers": None if number is None else int(number),
        **(modules if layout.recompute not in RECOMPUTE_MODES else {}),
    }


def _argument_groups(job: TrainerJob) -> list[list[str]]:
    """The values as overrides of the command line, such as "train.micro_batch_size=2"."""
    return overrides(MEGATRON_BRIDGE.values(job), _override)


def _placement_groups(job: TrainerJob) -> list[list[str]]:
    return overrides(MEGATRON_BRIDGE.placement_values(job), _override)


def _override(path: str, value: Any) -> list[str]:
    if (
        path.endswith(("_layout", "_pattern")) and value
    ):  # its signs mean something to the reader of overrides
        return [f'{path}="{value}"']
    return [f"{path}={'null' if value is None else word_of(value)}"]


_PLACEMENT: Final = (
    *(
        f"model.{name}"
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
            *("is_hybrid_model", "hybrid_layer_pattern"),
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            *("context_parallel_size", "cp_comm_type", "sequence_parallel"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("recompute_granularity", "recompute_method", "recompute_num_layers"),
            *("recompute_modules", "cpu_offloading", "cpu_offloading_num_layers"),
        )
    ),
    *("train.micro_batch_size", "train.global_batch_size", "ddp", "dist"),
    *("checkpoint.ckpt_format", "optimizer", "mixed_precision"),
)


_UNFUSED: Final = shape_rules(
    "Megatron-Bridge's overrides, which stay words where megatron-core compares its AttnBackend",
    "training/utils/omegaconf_utils.py, _apply_overrides; megatron-core's LanguageModule",
    ("attention",),
)

_INTERLEAVED_HYBRID: Final = TrainerRule(
    name="interleaved_hybrid",
    source="models/hybrid/hybrid_provider.py, provide",
    broken=lambda layout, model: layout.vpp > 1 and core_fields.is_hybrid(model),
    sentence=lambda layout, _: (
        f"vpp={layout.vpp}: Megatron-Bridge's hybrid models have no interleaved schedule; export a "
        "trial with vpp=1, or use the format megatron-lm"
    ),
)


_RECIPE_NOTE: Final = (
    "the recipe is of another model with such layers, whose config.json it reads from Hugging Face "
    "unless it is a hybrid; what neither layout nor model says stays as the recipe has it"
)
_FP16: Final = (
    "mixed_precision=fp16_mixed starts at a loss scale of 2^32, so that the first 16 steps or so do not "
    "train; a program of your own can set get_mixed_precision_config('fp16_mixed') with "
    f"initial_loss_scale={INITIAL_LOSS_SCALE} in its place"
)

MEGATRON_BRIDGE: Final = TrainerAdapter(
    name="megatron-bridge",
    target_version="Megatron-Bridge of 2026-08 (067f987d)",
    needs="a checkout of Megatron-Bridge in BRIDGE_DIR, Python 3.12 and Transformer Engine",
    rank_orders=RANK_ORDERS,
    levers=lambda _layout: ("stages", "modules", "layers", "activations", "optimizer"),
    rules=(*ARGUMENT_RULES, core_fields.LACKING_FIELDS, _INTERLEAVED_HYBRID, *_UNFUSED),
    layout_values=_values,
    layout_arguments=_argument_groups,
    placement_groups=_placement_groups,
    placement_paths=_PLACEMENT,
    values_are_arguments=True,
    notes=lambda job: [
        *notes(job, "Megatron-Bridge"),
        *([_RECIPE_NOTE] if recipe_of(job.model) != RECIPE else []),
        *([_FP16] if job.layout.precision == "fp16" else []),
        "this format was compared with the source of Megatron-Bridge, and never read by it",
    ],
    log=LogPatterns(variants=(*STEP_LINES, _NEMO)),
    knobs=MEGATRON_BRIDGE_KNOBS,
)
