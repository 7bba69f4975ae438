"""Megatron-LM's pretrain_gpt.py, and what its relatives share with it.

The flags are those of `megatron/training/arguments.py` (many are generated there from dataclasses),
and the refusals are its asserts and those of megatron-core's configurations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, Layout, Precision
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.layouts.recomputation import ALL_LAYERS, modules_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import counted
from layout_tuner.trainers.adapter import (
    INITIAL_LOSS_SCALE,
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
)
from layout_tuner.trainers.knobs.megatron import MEGATRON_LM_KNOBS
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.shapes import core_fields

NORM_EPSILON: Final = 1e-5
"""Of the embedded model's norms."""
INIT_STD: Final = 0.02
"""Standard deviation of the embedded model's initial weights. Megatron divides it by
sqrt(2 num_layers) in output projections, as the embedded model does."""

_STEP: Final = (
    r"iteration +(?P<index>\d+)/ *\d+ \|.*?elapsed time per iteration \(ms\): "
    r"(?P<step_time_ms>[\d.]+)(?:/[\d.]+| \(avg [\d.]+\))?"
)
_LOSS_AND_SKIPPED: Final = (
    r" (?=\|)(?:.*?\| (?:lm[ _])?loss: (?P<loss>[^ |]+)(?= *\|))?"
    r"(?:.*?\| loss scale: (?P<loss_scale>[^ |]+)(?= *\|))?"
    r"(?:.*? number of skipped iterations: +(?P<skipped>\d+)\b)?"
)
STEP_LINES: Final = (
    StepPattern(
        source="Megatron-LM, core 0.16 and later",
        pattern=rf"\[\d{{4}}-\d\d-\d\d [\d:]{{8}}\.\d+\] {_STEP}{_LOSS_AND_SKIPPED}",
        repeats_first=True,
    ),
    StepPattern(
        source="Megatron-LM 1.0 to core 0.15, Megatron-Bridge, Megatron-DeepSpeed, gpt-neox, Primus",
        pattern=_STEP + _LOSS_AND_SKIPPED,
    ),
)
"""The line of `training_log`. Times are means of the steps since the line before, to which AMD
Primus 0.1 to 26.5 adds a running mean (now/mean). The loss is the mean of the steps that were not
skipped; it is left out while it is negative or not a number."""


def _problems(layout: Layout, model: ModelShape) -> list[str]:
    return [sentence for is_broken, sentence in _checks(layout, model) if is_broken]


def _checks(layout: Layout, model: ModelShape) -> Iterator[tuple[bool, str]]:
    tp, pp, vpp = layout.tp, layout.pp, layout.vpp
    for name in ("num_heads", "ffn_hidden_size", "vocab_size"):
        size = getattr(model, name)
        yield size % tp != 0, f"{name}={size} is not divisible by tp={tp}"
    yield (
        model.num_kv_heads % tp != 0,
        f"num_kv_heads={model.num_kv_heads} is not divisible by tp={tp}: key/value heads would be "
        "replicated, which was not measured",
    )
    counted = layout.counted_layers(model.num_layers)
    yield (
        counted % (pp * vpp) != 0 and not layout.is_written_out,
        f"num_layers{'+1' * sum(layout.counted_ends)}={counted} is not divisible by pp*vpp={pp}*{vpp}"
        f"={pp * vpp}; Megatron-LM and Megatron-Bridge take unequal stages as pipeline_layout",
    )
    yield vpp > 1 and pp == 1, f"vpp={vpp} needs a pipeline, and pp=1"
    yield (
        vpp > 1 and layout.num_microbatches % pp != 0,
        f"num_microbatches={layout.num_microbatches} is not divisible by pp={pp}, which the "
        f"interleaved schedule of vpp={vpp} needs",
    )
    yield layout.sequence_parallel and tp == 1, "sequence_parallel=true needs tp over 1, and tp=1"
    yield (
        layout.sequence_parallel and model.seq_length % tp != 0,
        f"seq_length={model.seq_length} is not divisible by tp={tp}, which sequence_parallel needs",
    )
    chunks = 2 * layout.cp
    yield (
        layout.cp > 1 and model.seq_length % chunks != 0,
        f"seq_length={model.seq_length} is not divisible by 2*cp={chunks}",
    )
    yield (
        layout.cp_comm_type == "a2a" and model.num_heads % (tp * layout.cp) != 0,
        f"num_heads={model.num_heads} is not divisible by tp*cp={tp * layout.cp}, which a2a needs",
    )
    yield (
        layout.dp_cp % layout.zero_replicas != 0,
        f"{'dp' if layout.cp == 1 else 'dp*cp'}={layout.dp_cp} is not divisible by zero_replicas={layout.zero_replicas}",
    )
    yield from core_fields.mixer_checks(layout, model)
    yield from _expert_checks(layout, model)


def _expert_checks(layout: Layout, model: ModelShape) -> Iterator[tuple[bool, str]]:
    has_experts = model.num_experts > 0
    tp, ep, etp, width = layout.tp, layout.ep, layout.etp, model.shared_expert_ffn_hidden_size
    yield width % tp != 0, f"shared_expert_ffn_hidden_size={width} is not divisible by tp={tp}"
    yield not has_experts and ep * etp > 1, f"ep={ep} and etp={etp} need a model with experts"
    if not has_experts:
        return
    yield (
        model.moe_ffn_hidden_size % etp != 0,
        f"moe_ffn_hidden_size={model.moe_ffn_hidden_size} is not divisible by etp={etp}",
    )
    yield (
        model.num_experts % ep != 0,
        f"num_experts={model.num_experts} is not divisible by ep={ep}",
    )
    yield (
        model.biases_of == "all" and etp > 1,
        f"biases=all with etp={etp}: experts with biases are not divided; export a trial with etp=1",
    )
    ranks = tp * layout.dp_cp
    yield ranks % (etp * ep) != 0, f"tp*cp*dp={ranks} is not divisible by etp*ep={etp * ep}"
    yield (
        tp > 1 and not layout.sequence_parallel,
        f"tp={tp} with sequence_parallel=false: experts need the sequence shared over tp",
    )
    yield (
        layout.edp % layout.zero_replicas != 0,
        f"tp*cp*dp/(etp*ep)={layout.edp} is not divisible by zero_replicas={layout.zero_replicas}",
    )


UNFUSED_OVER_CP: Final = TrainerRule(
    name="unfused_over_cp",
    source="transformer_engine/pytorch/attention/dot_product_attention/utils.py, "
    "get_attention_backend; core/transformer/dot_product_attention.py",
    broken=lambda layout, model: layout.cp > 1 and model.attention == "unfused",
    sentence=lambda layout, _: (
        f"attention=unfused with cp={layout.cp}: neither Transformer Engine's unfused attention nor "
        "Megatron-LM's own has context parallelism; export a trial with cp=1"
    ),
)

ARGUMENT_RULES: Final = (
    TrainerRule(
        name="ranks_of_nodes",
        source="torch.distributed.run and srun start equally many ranks on each node",
        broken=lambda layout, _: layout.num_devices % layout.num_nodes != 0,
        sentence=lambda layout, _: (
            f"{'*'.join(layout.degrees)}={layout.num_devices} ranks are not the same number on "
            f"each of num_nodes={layout.num_nodes}"
        ),
    ),
    TrainerRule(
        name="sizes_divide",
        source="megatron/training/arguments.py, validate_args; TransformerConfig.__post_init__; "
        "core/parallel_state.py; core/pipeline_parallel/schedules.py",
        broken=lambda layout, model: bool(_problems(layout, model)),
        sentence=lambda layout, model: "; ".join(_problems(layout, model)),
    ),
    TrainerRule(
        name="modules_of_all_layers",
        source="core/transformer/transformer_config.py, __post_init__: selective takes no number",
        broken=lambda layout, _: (
            layout.recompute not in ("none", "full") and layout.recompute_layers != ALL_LAYERS
        ),
        sentence=lambda layout, _: (
            f"recompute={layout.recompute} with recompute_layers={layout.recompute_layers}: "
            "Megatron recomputes modules in all layers; state full, or leave recompute_layers out"
        ),
    ),
    TrainerRule(
        name="distributed_optimizer",
        source="megatron/training/arguments.py, validate_args: --use-precision-aware-optimizer",
        broken=lambda layout, _: (
            (layout.offload == "optimizer" or layout.optimizer_states == "bf16")
            and (layout.zero_stage == 0 or layout.precision == "fp32")
        ),
        sentence=lambda layout, _: (
            f"offload={layout.offload} and optimizer_states={layout.optimizer_states} with "
            f"zero_stage={layout.zero_stage} and precision={layout.precision}: Megatron's "
            "precision-aware optimizer needs the distributed one and 16-bit weights; export a "
            "trial with zero_stage=1"
        ),
    ),
    TrainerRule(
        name="rank_order_of_fsdp",
        source="Megatron-Bridge training/config.py, ConfigContainer.validate",
        broken=lambda layout, _: (
            layout.rank_order != RANK_ORDERS[0] and layout.zero_stage in SHARDING_STRATEGIES
        ),
        sentence=lambda layout, _: (
            f"rank_order={layout.rank_order} with zero_stage={layout.zero_stage}: Megatron-FSDP "
            "numbers ranks by tp, cp, dp and pp alone"
        ),
    ),
    TrainerRule(
        name="whole_rotary_base",
        source="megatron/training/arguments.py: --rotary-base has type=int",
        broken=lambda _, model: model.rotary_base % 1 != 0,
        sentence=lambda _, model: (
            f"rotary_base={model.rotary_base} is not a whole number, which the flag needs"
        ),
    ),
)
"""What all of the family refuse. The sizes are those of the rules of legality, which the asserts of
the trainer are nearly equal to."""


LAYOUT_FLAGS: Final[Mapping[str, str]] = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp_comm_type": "--cp-comm-type",
    "sequence_parallel": "--sequence-parallel",
    "zero_replicas": "--num-distributed-optimizer-instances",
    "micro_batch_size": "--micro-batch-size",
    "global_batch_size": "--global-batch-size",
}
"""The options that state one field of a layout each; `found_jobs.megatron` reads them."""
MODEL_FLAGS: Final[Mapping[str, str]] = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_heads": "--num-attention-heads",
    "seq_length": "--seq-length",
}
"""The options of a model's sizes that all of the family share."""
SPLIT_FLAGS: Final = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""They count embedding and head as layers of the pipeline's split."""
STAGES_FLAG: Final = "--pipeline-model-parallel-layout"
"""The layers of each of pp * vpp stages, in the letters of `Layout.pipeline_layout`."""
PATTERN_FLAG: Final = "--hybrid-layer-pattern"
"""The layers of a hybrid and the stages that have them, in place of all options of stages."""
HYBRID_SPEC: Final = [
    "--spec",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "hybrid_stack_spec",
]
MODULES_FLAG: Final = "--recompute-modules"
MODULE_NAMES: Final[Mapping[str, str]] = {"core_attention": "core_attn"}
"""Its names of modules that have another one here."""
OPTIMIZER_OFFLOAD_FLAG: Final = "--optimizer-cpu-offload"
PIPELINE_FIRST_FLAG: Final = "--use-tp-pp-dp-mapping"
"""It numbers the stages of a pipeline before its replicas."""


def _argument_groups(job: TrainerJob) -> list[list[str]]:
    layout, model = job.layout, job.model
    return [
        *parallel_flags(layout),
        *_mesh_and_split_flags(layout, model),
        *_interleaving_and_zero_flags(layout, model),
        *batch_flags(layout),
        *shape_flags(model),
        *([HYBRID_SPEC] if core_fields.is_hybrid(model) else []),
        # No padding of the vocabulary, as in the probe.
        ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size)],
        *_family_flags(model),
        *_attention_flags(model),
        *_flags(core_fields.expert_values(job)),
        *recompute_flags(layout),
        *_lever_flags(job),
        ["--seed", str(job.seed + 1)],  # all of the family refuse 0
    ]


_OF_THE_PLACEMENT: Final = re.compile(r"--(expert-\S+-size|moe-grouped-gemm|moe-token-\S+)")
"""Options of experts that belong to the layout, and those that job knobs replace."""


def _placement_groups(job: TrainerJob) -> list[list[str]]:
    layout = job.layout
    return [
        *parallel_flags(layout),
        *_mesh_and_split_flags(layout, job.model),
        *_interleaving_and_zero_flags(layout, job.model),
        *batch_flags(layout, with_loss_scale=False),
        *(
            words
            for words in _flags(core_fields.expert_values(job))
            if _OF_THE_PLACEMENT.fullmatch(words[0])
        ),
        *recompute_flags(layout),
        *_lever_flags(job),
    ]


def parallel_flags(layout: Layout) -> list[list[str]]:
    """Degrees, and sequence parallelism."""
    flags = [
        [LAYOUT_FLAGS["tp"], str(layout.tp)],
        [LAYOUT_FLAGS["pp"], str(layout.pp)],
    ]
    if layout.sequence_parallel:
        flags.append([LAYOUT_FLAGS["sequence_parallel"]])
    return flags


CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""A variable that Megatron-LM asks to be 1 with tp or cp above 1, and Megatron-FSDP refuses as 1
(megatron/training/arguments.py, validate_args)."""
SHARDING_STRATEGIES: Final[Mapping[int, str]] = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's strategy by ZeRO stage; in Megatron Core from 0.14 on."""
FSDP_CHECKPOINTS: Final = "fsdp_dtensor"
"""The only format of checkpoints that Megatron-FSDP accepts."""


def _mesh_and_split_flags(layout: Layout, model: ModelShape) -> list[list[str]]:
    flags = []
    if layout.cp > 1:
        named = [(LAYOUT_FLAGS[name], getattr(layout, name)) for name in ("cp", "cp_comm_type")]
        flags.append([str(word) for pair in named for word in pair])
    if layout.rank_order == "tp_cp_pp_dp":
        flags.append([PIPELINE_FIRST_FLAG])
    if core_fields.is_hybrid(model):  # with it the options of stages are refused
        pattern = core_fields.hybrid_pattern(layout, model)
        # The letter of a dense layer is a dash: a word that begins with one would be a flag.
        is_flag = pattern.startswith("-")
        return [*flags, [f"{PATTERN_FLAG}={pattern}"] if is_flag else [PATTERN_FLAG, pattern]]
    if layout.is_written_out:
        flags.append([STAGES_FLAG, core_fields.stages_text(layout, model)])
    counted_ends = zip(SPLIT_FLAGS, layout.counted_ends, strict=True)
    flags += [[name] for name, counts in counted_ends if counts]
    return flags


def _interleaving_and_zero_flags(layout: Layout, model: ModelShape) -> list[list[str]]:
    flags = []
    # Stages that are written out say it, and the option is refused.
    if layout.vpp > 1 and not layout.is_written_out and not core_fields.is_hybrid(model):
        flags.append([LAYOUT_FLAGS["vpp"], str(layout.vpp)])
    if layout.zero_stage:
        flags += [
            ["--use-distributed-optimizer"],
            ["--overlap-grad-reduce"],
            ["--overlap-param-gather"],
        ]
    if layout.zero_stage in SHARDING_STRATEGIES:
        strategy = SHARDING_STRATEGIES[layout.zero_stage]
        flags += [
            ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy],
            ["--ckpt-format", FSDP_CHECKPOINTS],
        ]
    if layout.zero_replicas > 1:
        flags.append([LAYOUT_FLAGS["zero_replicas"], str(layout.zero_replicas)])
    return flags


_PRECISION_FLAGS: Final[Mapping[Precision, list[list[str]]]] = {
    "fp32": [],
    "bf16": [["--bf16"]],
    "fp16": [["--fp16", "--initial-loss-scale", str(INITIAL_LOSS_SCALE)]],
    "fp8": [["--bf16"], ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]],
    "fp8_block": [["--bf16"], ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"]],
    "mxfp8": [["--bf16"], ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]],
    "nvfp4": [["--bf16"], ["--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]],
}
NARROW_WEIGHTS: Final[Mapping[str, list[str]]] = {
    "mxfp8": ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"],
    "nvfp4": ["--fp4-param-gather"],
}
"""Keep weights in the type alone, which the distributed optimizer can (validate_args)."""


def batch_flags(layout: Layout, *, with_loss_scale: bool = True) -> list[list[str]]:
    """Batch and precision; the number of micro-batches follows from the number of ranks."""
    precision = _PRECISION_FLAGS[layout.precision]
    if layout.precision == "fp16" and not with_loss_scale:
        precision = [["--fp16"]]
    if layout.zero_stage and layout.precision in NARROW_WEIGHTS:
        precision = [*precision, NARROW_WEIGHTS[layout.precision]]
    return [
        [LAYOUT_FLAGS["micro_batch_size"], str(layout.micro_batch_size)],
        [LAYOUT_FLAGS["global_batch_size"], str(layout.global_batch_size)],
        *precision,
    ]


def shape_flags(model: ModelShape) -> list[list[str]]:
    """The sizes of the model, and what the embedded one fixes, under names that all share."""
    flags = [
        *([flag, str(getattr(model, name))] for name, flag in MODEL_FLAGS.items()),
        ["--max-position-embeddings", str(model.seq_length)],
        ["--make-vocab-size-divisible-by", "1"],
        [
            *("--attention-dropout", str(model.attention_dropout or 0.0)),
            *("--hidden-dropout", str(model.hidden_dropout)),
        ],
        ["--init-method-std", str(INIT_STD)],
    ]
    activations = {"swiglu": ["--swiglu"], "relu2": ["--squared-relu", "--no-bias-gelu-fusion"]}
    unbiased = ["--disable-bias-linear"] if model.biases_of != "all" else []
    if words := [*activations.get(model.activation_of, []), *unbiased]:
        flags.append(words)
    if not model.tied_embeddings:
        flags.append(["--untie-embeddings-and-output-weights"])
    return flags


def _family_flags(model: ModelShape) -> list[list[str]]:
    flags = [["--norm-epsilon", str(NORM_EPSILON)]]
    if model.num_kv_heads != model.num_heads:
        flags.append(["--group-query-attention", "--num-query-groups", str(model.num_kv_heads)])
    if not model.has_layer_norms:
        flags.append(["--normalization", "RMSNorm"])
    positions = ["--position-embedding-type", position_type(model)]
    if positions[1] == "rope":
        positions += ["--rotary-base", str(int(model.rotary_base))]
    return [*flags, positions]


def position_type(model: ModelShape) -> str:
    """The word for the positions that a model adds or rotates by."""
    if model.family == "gpt":
        return "learned_absolute"
    return "rope" if model.rotary_fraction else "none"


def _attention_flags(model: ModelShape) -> list[list[str]]:
    word = {"fused": "auto", "unfused": "unfused"}.get(model.attention or "")
    backend = [["--attention-backend", word]] if word else []
    return [*backend, *_flags(core_fields.attention_values(model))]


_FLAG_NAMES: Final = {"num_moe_experts": "--num-experts", "apply_rope_fusion": "--no-rope-fusion"}
"""Flags with other names than their fields."""


def _flags(values: Mapping[str, Any]) -> list[list[str]]:
    """Fields of megatron-core as flags."""
    flags: list[list[str]] = []
    for name, value in values.items():
        words = [_FLAG_NAMES.get(name, f"--{name.replace('_', '-')}")]
        if value is None:
            continue
        if name == "window_size":
            words.append(",".join(map(str, value)))
        elif not isinstance(value, bool):
            words.append(str(value).replace(" ", ""))
        if name == "window_attn_skip_freq":
            flags[-1] += words
        else:
            flags.append(words)
    return flags


def recompute_flags(layout: Layout) -> list[list[str]]:
    """Recomputation: of attention's core, of other modules, or of whole layers."""
    if layout.recompute == "none":
        return []
    if layout.recompute == "full":
        # uniform, one layer at a time: every block is recomputed from its own input
        method = recompute_method(layout)
        return [
            ["--recompute-granularity", "full"],
            ["--recompute-method", method[0], "--recompute-num-layers", method[1]],
        ]
    flags = [["--recompute-granularity", "selective"]]
    if layout.recompute != "selective":
        flags.append([MODULES_FLAG, *recompute_modules(layout)])
    return flags


def recompute_method(layout: Layout) -> tuple[str, str]:
    """The method of full recomputation, and its number of layers, which is that of all ranks."""
    is_number = layout.recompute_layers.isdigit()
    return ("block", layout.recompute_layers) if is_number else ("uniform", "1")


def recompute_modules(layout: Layout) -> list[str]:
    """The modules that are recomputed alone, by Megatron's names."""
    return [MODULE_NAMES.get(name, name) for name in modules_of(layout.recompute)]


def offloaded_layers(job: TrainerJob) -> int:
    """The most layers whose activations it offloads: all but two (TransformerConfig)."""
    return max(job.model.num_layers - 2, 0) if job.layout.offload == "activations" else 0


def _lever_flags(job: TrainerJob) -> list[list[str]]:
    layout, flags = job.layout, []
    if layers := offloaded_layers(job):
        flags.append(["--cpu-offloading-num-layers", str(layers)])
    if layout.offload == "optimizer":
        flags.append([OPTIMIZER_OFFLOAD_FLAG])
    if layout.offload == "optimizer" or layout.optimizer_states == "bf16":
        flags.append(["--use-precision-aware-optimizer"])
    if layout.optimizer_states == "bf16":
        flags.append(["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"])
    return flags


def notes(job: TrainerJob, trainer: str) -> list[str]:
    """What all of the family need the user to know."""
    layout = job.layout
    found = [
        f"{trainer} derives dp and the number of micro-batches from the world size: start exactly "
        f"{counted(layout.num_devices, 'rank')}, {job.ranks_per_node} on each of "
        f"{counted(layout.num_nodes, 'node')}",
        f"seed {job.seed} of the campaign is seed {job.seed + 1} here: {trainer} refuses 0",
    ]
    if job.model.experts_per_token == 1 and job.model.router_score == "softmax":
        found.append(
            f"experts_per_token=1: {trainer} weighs an expert's output by the expert's share among all "
            "(--moe-router-pre-softmax, which it asks for), and the probe by 1, so that its router "
            "learns nothing: losses differ, time and memory do not"
        )
    if length := job.model.mean_document_length:
        found.append(
            f"mean_document_length={length} is your data's, with attention inside documents "
            "(--dataloader-inter-document-masking, since core 0.19); mock data takes longer"
        )
    if job.compile:
        found.append(
            f"the probe's compile=true has no flag here: {trainer} brings fused kernels of its own"
        )
    return found


def _notes(job: TrainerJob) -> list[str]:
    found = notes(job, "Megatron-LM")
    if job.layout.zero_stage in SHARDING_STRATEGIES:
        found.append(
            f"zero_stage={job.layout.zero_stage} is Megatron-FSDP, which refuses "
            "CUDA_DEVICE_MAX_CONNECTIONS=1"
        )
    if core_fields.is_hybrid(job.model):
        found.append(
            "pretrain_hybrid.py is of Megatron-LM core 0.18 and later, and needs mamba-ssm and "
            "causal-conv1d"
        )
    if job.model.linear_num_key_heads:
        found.append(
            "gated delta nets need core 0.16 or later (with cp 0.18), and flash-linear-attention"
        )
    if position_type(job.model) == "rope" and not job.model.kv_lora_rank:
        found.append("rotary positions need Transformer Engine 1.4 or later, or --no-rope-fusion")
    if job.model.attention == "fused":
        found.append(
            "attention=fused is --attention-backend auto: where neither fused kernel supports the job, "
            "it takes the unfused one; flash or fused in its place would fail then"
        )
    if job.model.num_experts:
        found.append(
            "--moe-grouped-gemm is refused on devices of compute capability below 8.0, such as V100: "
            "leave it out there"
        )
    if job.layout.precision == "fp32":
        found.append("without --bf16 or --fp16 Megatron-LM trains in fp32, as the probe did")
    if job.layout.precision == "fp8":
        found.append(
            "fp8 needs Transformer Engine; on Blackwell its recipe of smaller blocks is "
            "--fp8-format e4m3 --fp8-recipe mxfp8"
        )
    elif job.layout.precision in NARROW:
        found.append(f"{job.layout.precision} needs Transformer Engine 2.7 or later")
    return found


_GEGLU: Final = TrainerRule(
    name="geglu",
    source="megatron/training/argument_utils.py, core_transformer_config_from_args",
    broken=lambda _, model: model.activation_of == "geglu",
    sentence=lambda *_: (
        "activation=geglu: Megatron-LM has --quick-geglu alone, another function; use the format "
        "megatron-bridge"
    ),
)

MEGATRON_LM: Final = TrainerAdapter(
    name="megatron-lm",
    target_version="Megatron-LM of 2026-08 (d98e8a64)",
    needs="a checkout of Megatron-LM in MEGATRON_DIR",
    rank_orders=RANK_ORDERS,
    levers=lambda _layout: (
        *("stages", "modules", "layers", "activations", "optimizer", "bf16_states"),
    ),
    rules=(*ARGUMENT_RULES, core_fields.LACKING_FIELDS, _GEGLU, UNFUSED_OVER_CP),
    layout_arguments=_argument_groups,
    placement_groups=_placement_groups,
    notes=_notes,
    log=LogPatterns(variants=STEP_LINES),
    knobs=MEGATRON_LM_KNOBS,
)
