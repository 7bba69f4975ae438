"""torchtitan's Llama 3 trainer, in three versions with different configurations.

0.2 reads TOML, 0.3 and main a Python function that makes the configuration; main counts tokens
instead of sequences. The keys are those of `config/job_config.py` (0.2.2) and `config/configs.py`
(0.3.0 and main), the refusals those of `trainer.py`, `models/common/decoder.py` and
`models/llama3/parallelize.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.narrow_formats import wide_precision
from layout_tuner.search_spaces.models.model_fields import MODEL_RANGES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import (
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    kv_heads_rule,
    narrow_rule,
    overrides,
    shape_rules,
)
from layout_tuner.trainers.knobs.torchtitan import TORCHTITAN_0_2_KNOBS, TORCHTITAN_KNOBS
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.trainer_knob import TrainerKnob

TORCHTITAN_MAIN_REVISION: Final = "b5bcd76c"

_STEPS: Final = 100
DEGREE_KEYS: Final[Mapping[str, str]] = {
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
"""Keys of `[parallelism]`, by the layout's field."""
REPLICATE: Final = "data_parallel_replicate_degree"
SHARD: Final = "data_parallel_shard_degree"
BY_OPERATOR: Final = "op"
"""The option of 0.2's selective checkpointing that `recompute: selective` is; others take whole
layers."""
FLOAT8: Final = "quantize.linear.float8"
_CONVERTERS: Final[Mapping[str, tuple[str, str]]] = {
    "fp8": ("float8", "rowwise"),
    "mxfp8": ("mx", "mxfp8_cublas"),
}
"""Sections of `quantize.linear` in 0.2 that convert linear layers, and their recipes."""

_LOG: Final = LogPatterns(
    variants=(
        StepPattern(
            source="torchtitan, with or without grad_norm; wps until November 2024",
            pattern=(
                r"(?<!validate )step:\s*(?P<index>\d+)\s+loss:\s*(?:-[\d.]+|(?P<loss>\S+))\s.*?"
                r"memory:\s*(?P<peak_memory_gib>[\d.]+)GiB.*?"
                r"[tw]ps:\s*(?P<tokens_per_s_per_device>[\d,]+)"
            ),
        ),
    )
)
"""One line a step, as `metrics.log_freq` is 1 in the exported files. With another one lines are of
step 1 and of every nth, the rate is the mean since the line before, and the loss is the last
step's. Ranks of other pipeline stages than the last print a loss of -1 a gradient accumulation."""


def _is_parallel_beyond_data(layout: Layout) -> bool:
    return layout.tp > 1 or layout.cp > 1 or layout.pp > 1


def _lacking(job: TrainerJob) -> dict[str, str]:
    """What all three versions lack."""
    layout = job.layout
    lacking = {}
    if layout.zero_stage == 1:
        lacking["zero_stage"] = (
            "torchtitan has DDP, HSDP and FSDP, but no ZeRO-1; without it every replica holds whole "
            "optimizer states, which need more memory"
        )
    if layout.cp > 1:
        lacking["zero_stage"] = (
            "torchtitan has context parallelism beside FSDP only; without the choice weights, gradients "
            f"and optimizer states are sharded over cp={layout.cp}"
        )
    if layout.cp > 1 and layout.cp_comm_type == "a2a":
        lacking["cp_comm_type"] = (
            "torchtitan gathers keys and values or passes them around a ring, and does not exchange "
            "tokens for heads; without the choice it gathers them"
        )
    if layout.precision == "fp16":
        lacking["precision"] = (
            "torchtitan has bfloat16 and float32, but no float16; without it training is in fp32"
        )
    return lacking


def _lacking_in_0_3(job: TrainerJob) -> dict[str, str]:
    lacking = _lacking(job)
    if job.layout.cp > 1 and job.layout.cp_comm_type == "p2p":
        lacking["cp_comm_type"] = (
            "torchtitan since 0.3 gathers keys and values, and has no ring; without the choice it "
            "gathers them"
        )
    return lacking


def _lacking_in_0_2(job: TrainerJob) -> dict[str, str]:
    layout = job.layout
    lacking = _lacking(job)
    compiles = job.compile or layout.job.get("compile")
    if layout.precision == "mxfp8" and layout.tp > 1 and compiles:
        lacking["precision"] = (
            f"torchtitan 0.2 has mxfp8 with tp={layout.tp} only without torch.compile; without the "
            "choice training is in fp32"
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        lacking["sequence_parallel"] = (
            "torchtitan 0.2 always shares the sequence where tp is above 1; without the choice it is "
            "shared, which needs less memory"
        )
    if layout.dp > 1 and _is_parallel_beyond_data(layout) and layout.zero_stage < 2:
        lacking["zero_stage"] = (
            "torchtitan 0.2 has neither ZeRO-1 nor DDP beside tp or pp (it says: DDP has not "
            f"supported > 1D parallelism; tp={layout.tp}, pp={layout.pp}); without it FSDP shards "
            f"weights, gradients and optimizer states over dp={layout.dp}"
        )
    if (
        wide_precision(layout.precision) == "bf16"
        and layout.dp_cp == 1
        and _is_parallel_beyond_data(layout)
    ):
        lacking["precision"] = (
            "torchtitan 0.2 has mixed precision beside tp or pp only with FSDP, and so not with dp=1; "
            "without it training is in fp32"
        )
    return lacking


def _sequence_rule(source: str, factors: Callable[[Layout], Mapping[str, int]]) -> TrainerRule:
    return TrainerRule(
        name="sequence",
        source=source,
        broken=lambda layout, model: model.seq_length % prod(factors(layout).values()) != 0,
        sentence=lambda layout, model: (
            f"seq_length={model.seq_length} is not divisible by "
            f"{' * '.join(factors(layout))} = {prod(factors(layout).values())}, which "
            "torchtitan asks for"
        ),
    )


def _factors_of_0_3(layout: Layout) -> Mapping[str, int]:
    tp = {"tp": layout.tp} if layout.sequence_parallel else {}
    return tp if layout.cp == 1 else {"2": 2, **tp, "cp": layout.cp}


_RULES: Final = (
    TrainerRule(
        name="family",
        source="models/llama3: the export trains its model",
        broken=lambda _, model: model.family != "llama",
        sentence=lambda _, model: (
            f"family={model.family} has no counterpart: the export trains torchtitan's llama3; "
            "search with a model of family llama"
        ),
    ),
    TrainerRule(
        name="copies_of_shards",
        source="distributed/parallel_dims.py, ParallelDims",
        broken=lambda layout, _: (
            layout.zero_stage in RESHARD and layout.dp % layout.zero_replicas != 0
        ),
        sentence=lambda layout, _: (
            f"dp={layout.dp} is not divisible by zero_replicas={layout.zero_replicas}: "
            "torchtitan's copies of the shards are replicas of dp, and cp ranks share one copy"
        ),
    ),
    *shape_rules("torchtitan's llama3, which the export trains", "models/llama3"),
    kv_heads_rule(
        "torchtitan",
        "models/common/decoder.py, Decoder.Config.update_from_config (0.3, main); DTensor",
    ),
    TrainerRule(
        name="even_stages",
        source="distributed/pipeline_parallel.py: its last stages would have fewer layers",
        broken=lambda layout, model: (
            layout.pp > 1
            and not layout.is_written_out
            and layout.counted_layers(model.num_layers) % (layout.pp * layout.vpp) != 0
        ),
        sentence=lambda layout, model: (
            f"num_layers{'+1' * sum(layout.counted_ends)}="
            f"{layout.counted_layers(model.num_layers)} is not divisible by "
            f"pp*vpp={layout.pp}*{layout.vpp}: torchtitan would cut uneven stages; "
            "state them as pipeline_layout"
        ),
    ),
    TrainerRule(
        name="microbatches_of_1f1b",
        source="torch/distributed/pipelining/schedules.py, Schedule1F1B",
        versions="torch 2.13 and main",
        broken=lambda layout, _: (
            (layout.schedule, layout.vpp) == ("1f1b", 1) and layout.num_microbatches < layout.pp
        ),
        sentence=lambda layout, _: (
            f"num_microbatches={layout.num_microbatches} is less than pp={layout.pp}: torch's "
            "Schedule1F1B takes at least as many micro-batches as stages; export a trial with more, or "
            "one with schedule=gpipe"
        ),
    ),
)

_RULES_OF_0_2: Final = (
    *_RULES,
    narrow_rule(
        "config/job_config.py, QuantizedLinear",
        "has no converter in torchtitan 0.2, which has those of fp8 and mxfp8; use the format "
        "megatron-lm",
        tuple(_CONVERTERS),
        versions="0.2.2",
    ),
    _sequence_rule(
        "models/llama3/infra/parallelize.py, parallelize_llama",
        lambda layout: {"2": 2, "tp": layout.tp} | ({"cp": layout.cp} if layout.cp > 1 else {}),
    ),
    TrainerRule(
        name="tied_embeddings",
        source="models/llama3/model/args.py, TransformerModelArgs",
        versions="0.2.2",
        broken=lambda _, model: model.family == "llama" and model.tied_embeddings,
        sentence=lambda *_: "tied_embeddings=true has no counterpart in torchtitan 0.2's llama3",
    ),
)

_RULES_OF_0_3: Final = (
    *_RULES,
    _sequence_rule("trainer.py, Trainer.__init__", _factors_of_0_3),
    narrow_rule(
        "models/llama3: part of the model's configuration",
        "is a part of the model's own configuration in this version of torchtitan, which the export "
        "does not write; use the format torchtitan-0.2, or megatron-lm",
        versions="0.3.0 and main",
    ),
    TrainerRule(
        name="tied_embeddings",
        source="models/common/decoder.py, Decoder.Config.update_from_config",
        versions="0.3.0 and main",
        broken=lambda layout, model: (
            model.family == "llama" and model.tied_embeddings and layout.pp > 1
        ),
        sentence=lambda layout, _: (
            f"tied_embeddings=true with pp={layout.pp}: torchtitan does not tie weights across "
            "pipeline stages; export a trial with pp=1"
        ),
    ),
)


def _pipeline(job: TrainerJob, output: str) -> dict[str, Any]:
    """The stages: without them, torchtitan counts embedding and output as a layer each.

    `output` is the name of the module of the output projection.
    """
    layout = job.layout
    embedding, head = layout.counted_ends
    counted = layout.counted_layers(job.model.num_layers)
    if layout.pp == 1:
        return {}
    is_interleaved = layout.vpp > 1 and not layout.is_v_shaped
    schedule = "Interleaved1F1B" if is_interleaved else SCHEDULES[layout.schedule]
    if layout.is_written_out:
        return {
            "pipeline_parallel_schedule": schedule,
            MODULES: _modules_of_stages(layout, job.model.num_layers, output),
        }
    return {
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_layers_per_stage": counted // (layout.pp * layout.vpp),
        "pipeline_parallel_first_stage_less_layers": embedding,
        "pipeline_parallel_last_stage_less_layers": head,
    }


def _modules_of_stages(layout: Layout, num_layers: int, output: str) -> list[list[str]]:
    """The modules of each stage by name, as `_generate_llm_fqn_per_model_part` lists them."""
    stages = [
        [f"layers.{layer}" for layer in layout.layers_of_stage(stage, num_layers)]
        for stage in range(layout.pp * layout.vpp)
    ]
    return [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], "norm", output]]


MODULES: Final = "module_fqns_per_model_part"
SCHEDULES: Final = {"1f1b": "1F1B", "gpipe": "GPipe", "zbv": "ZBVZeroBubble"}
"""Its schedules: the last one has two stages a rank, as the interleaved one may have."""
RESHARD: Final[Mapping[int, str]] = {2: "never", 3: "always"}
"""When FSDP frees a layer's weights after its forward pass, by ZeRO stage."""
ROTATE_METHODS: Final = {"all_gather": "allgather", "p2p": "alltoall"}
"""The names that torch gives them, which 0.2 alone reads. Its all-to-all is the step of a ring."""


_LAYER: Final = re.compile(r"layers\.(\d{1,9})")


def stage_layers(
    num_layers: int,
    number: int,
    modules: Any,
    points: Sequence[str],
    per_stage: int | None,
    first: int,
    last: int,
) -> list[int] | None:
    """Transformer layers of each stage; None: there are no such stages.

    As in `distributed/pipeline_parallel.py`: pipeline_llm, generate_llm_fqn_per_model_part.

    Args:
        num_layers: those of the model.
        number: of stages, where the others do not state it.
        modules: names of modules by stage.
        points: names of the layers with which stages begin, but for the first one.
        per_stage: layers of each stage, counted ends included.
        first: layers that the embedding counts as.
        last: layers that the head counts as.
    """
    if modules:
        if not isinstance(modules, list) or not all(isinstance(each, list) for each in modules):
            return None
        return [sum(str(name).startswith("layers.") for name in each) for each in modules]
    if points:
        starts = [_LAYER.fullmatch(each) for each in points]
        ends = [int(each[1]) for each in starts if each]
        whole = len(ends) == len(points)
        return [end - start for start, end in pairwise([0, *ends, num_layers])] if whole else None
    counted = num_layers + first + last
    number = -(-counted // per_stage) if per_stage else number
    if number > MODEL_RANGES["num_layers"].high:
        return None
    each, more = divmod(counted, number)
    stages = [each + (index < more) for index in range(number)]
    stages[0] -= first
    stages[-1] -= last
    return stages


def _degrees(layout: Layout, replicas: int) -> dict[str, Any]:
    """Degrees; `replicas` without FSDP, which has the copies of the shards."""
    more: dict[str, Any] = {}
    if layout.zero_stage in RESHARD:
        replicas = layout.zero_replicas
        more["fsdp_reshard_after_forward"] = RESHARD[layout.zero_stage]
    if layout.cp > 1:
        more[DEGREE_KEYS["cp"]] = layout.cp
    return {
        **more,
        REPLICATE: replicas,
        SHARD: layout.dp // replicas,
        **{DEGREE_KEYS[name]: getattr(layout, name) for name in ("tp", "pp")},
    }


def _sequences(job: TrainerJob) -> dict[str, Any]:
    """The batch of 0.2 and 0.3: a pipeline takes all micro-batches of a replica at once."""
    layout = job.layout
    at_once = layout.num_microbatches if layout.pp > 1 else 1
    return {
        "local_batch_size": layout.micro_batch_size * at_once,
        "global_batch_size": layout.global_batch_size,
        "seq_len": job.model.seq_length,
    }


def _micro_batch(layout: Layout) -> dict[str, Any]:
    if layout.pp == 1:
        return {}
    return {"pipeline_parallel_microbatch_size": layout.micro_batch_size}


def _training(job: TrainerJob) -> dict[str, Any]:
    half = wide_precision(job.layout.precision) == "bf16"
    return {"steps": _STEPS, "mixed_precision_param": "bfloat16" if half else "float32"}


def _values_of_0_2(job: TrainerJob) -> Mapping[str, Any]:
    """The TOML file, by section; `experimental.custom_import` registers the model's shape."""
    layout = job.layout
    replicas = 1 if _is_parallel_beyond_data(layout) else layout.dp
    converter, recipe = _CONVERTERS.get(layout.precision, ("", ""))
    rotation = ROTATE_METHODS.get(layout.cp_comm_type)
    exchange = {"context_parallel_rotate_method": rotation} if layout.cp > 1 else {}
    return {
        "model": {
            "name": "llama3",
            "flavor": "layout",
            **({"converters": [f"quantize.linear.{converter}"]} if converter else {}),
        },
        "experimental": {"custom_import": "torchtitan_model"},
        "training": {**_sequences(job), **_training(job), "dataset": "c4"},
        "parallelism": {
            **_degrees(layout, replicas),
            **exchange,
            **_pipeline(job, "output"),
            **_micro_batch(layout),
        },
        "activation_checkpoint": {
            "mode": layout.recompute,
            **({"selective_ac_option": BY_OPERATOR} if layout.recompute == "selective" else {}),
        },
        **({"quantize": {"linear": {converter: {"recipe_name": recipe}}}} if converter else {}),
        "compile": {"enable": job.compile},
        "metrics": {"log_freq": 1},
        "debug": {"seed": job.seed},
    }


def model_arguments_of_0_2(model: ModelShape) -> Mapping[str, Any]:
    """The arguments of 0.2's TransformerModelArgs.

    It rounds the feed-forward width 8 h / 3 * ffn_dim_multiplier up to a multiple of `multiple_of`:
    with that width as the multiple, and a product of at most it, the result is exact.
    """
    return {
        "dim": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": model.ffn_hidden_size,
        "ffn_dim_multiplier": model.ffn_hidden_size / (4 * model.hidden_size),
        "norm_eps": 1e-5,
        "rope_theta": model.rotary_base,
        "max_seq_len": model.seq_length,
    }


def _sections_of_0_3(
    job: TrainerJob, batch: Mapping[str, Any], pipeline: Mapping[str, Any]
) -> dict[str, Any]:
    layout = job.layout
    return {
        "training": {
            **batch,
            **_training(job),
            "disable_cuda_graphs": layout.pp > 1,  # refused beside a pipeline
        },
        "parallelism": {
            **_degrees(layout, layout.dp),
            "enable_sequence_parallel": layout.sequence_parallel,
            **_pipeline(job, "lm_head"),
            **pipeline,
        },
        "compile": {"enable": job.compile},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "profiler": {"enable_profiling": False},
        "debug": {"seed": job.seed},
    }


def _values_of_0_3(job: TrainerJob) -> Mapping[str, Any]:
    """The fields of Trainer.Config, by section."""
    return _sections_of_0_3(job, _sequences(job), _micro_batch(job.layout))


def _values_of_main(job: TrainerJob) -> Mapping[str, Any]:
    layout, seq_length = job.layout, job.model.seq_length
    batch = {
        "num_tokens_per_microbatch_per_dp_rank": layout.micro_batch_size * seq_length,
        "num_tokens_per_train_step": layout.global_batch_size * seq_length,
        "max_context_length": seq_length,
    }
    pipeline = {"num_pp_microbatches": layout.num_microbatches} if layout.pp > 1 else {}
    values = _sections_of_0_3(job, batch, pipeline)
    if layout.optimizer_states == "bf16":
        values["optimizer"] = {"implementation": "fused_opt_states_bf16"}
    return values


def _notes(job: TrainerJob) -> list[str]:
    notes = [
        "the data is torchtitan's c4, and learning rate and optimizer are torchtitan's: set your own "
        "in the file or as further arguments",
        "the tokenizer of TOKENIZER_DIR must have no more tokens than the model's vocabulary",
    ]
    if job.layout.recompute == "selective":
        notes.append(
            "torchtitan's selective recomputation keeps attention and every second matrix product, "
            "and repeats all else"
        )
    return notes


def _adapter(
    name: str,
    target_version: str,
    values: Callable[[TrainerJob], Mapping[str, Any]],
    *,
    lacking: Callable[[TrainerJob], Mapping[str, str]] = _lacking_in_0_3,
    rules: Sequence[TrainerRule] = _RULES_OF_0_3,
    knobs: Sequence[TrainerKnob] = TORCHTITAN_KNOBS,
    levers: Sequence[str] = ("stages",),
    **placement: Any,
) -> TrainerAdapter:
    return TrainerAdapter(
        name=name,
        target_version=target_version,
        needs=f"{target_version}, a tokenizer's folder in TOKENIZER_DIR, and a GPU",
        lacking=lacking,
        schedules=SCHEDULES,
        levers=lambda _layout: levers,
        rules=rules,
        layout_values=values,
        notes=_notes,
        log=_LOG,
        knobs=knobs,
        **placement,
    )


def _placement_of_0_2(job: TrainerJob) -> list[list[str]]:
    """Overrides of the command line, which tyro reads: `--section.no-switch` turns one off."""
    return overrides(TORCHTITAN_0_2.placement_values(job), _override)


def _override(path: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        section, _, name = path.rpartition(".")
        return [f"--{path}" if value else f"--{section}.no-{name}"]
    return [f"--{path}", *map(word_of, value if isinstance(value, list) else [value])]


TORCHTITAN_0_2: Final = _adapter(
    "torchtitan-0.2",
    "torchtitan 0.2.2",
    _values_of_0_2,
    lacking=_lacking_in_0_2,
    rules=_RULES_OF_0_2,
    knobs=TORCHTITAN_0_2_KNOBS,
    placement_groups=_placement_of_0_2,
    values_are_arguments=True,
    placement_paths=(
        "training.local_batch_size",
        "training.global_batch_size",
        "training.mixed_precision_param",
        "model.converters",
        "parallelism",
        "activation_checkpoint",
    ),
)
TORCHTITAN_0_3: Final = _adapter("torchtitan-0.3", "torchtitan 0.3.0", _values_of_0_3)
TORCHTITAN_MAIN: Final = _adapter(
    "torchtitan-main",
    f"torchtitan main of 2026-08 ({TORCHTITAN_MAIN_REVISION})",
    _values_of_main,
    levers=("stages", "bf16_states"),
)
