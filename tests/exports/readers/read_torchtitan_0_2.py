"""Reads exported files with torchtitan 0.2's own parser, and prints layouts and models as JSON."""

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

from answers import asked_fields, print_answers, stand_in
from titan_stages import V_SCHEDULE, build_schedule, check_stages

# Triton (1 GB) is imported for kernels of mixtures of experts alone, TensorBoard for its figures.
stand_in("torchtitan.models.moe.kernels", "torch.utils.tensorboard")

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims, pipeline_parallel  # noqa: E402
from torchtitan.models.llama3 import llama3_args  # noqa: E402
from torchtitan.models.llama3.infra import parallelize  # noqa: E402
from torchtitan.models.llama3.model.model import TransformerBlock  # noqa: E402


def model_of(config, folder):
    """Registers the shape as the training program would, and builds one block of it."""
    name = config.experimental.custom_import
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return llama3_args[config.model.flavor]


for name in ("tp", "ac", "compile", "fsdp", "ddp", "cp_to_attention_module"):
    setattr(parallelize, f"apply_{name}", lambda *_args, **_kwargs: None)  # needs the device


def check_parallelism(model, dims, config):
    """Calls `parallelize_llama` for its own checks, without what it does to the model."""
    dims.get_mesh = lambda names: SimpleNamespace(size=lambda: getattr(dims, names, None))
    shape = SimpleNamespace(model_args=model, layers={})
    parallelize.parallelize_llama(shape, dims, config)


class Stages(Exception):
    """Ends the building of a pipeline once it has the names of each stage's modules."""


def stages_of(model, dims, config):
    """The stages as `pipeline_llm` cuts and checks them, before it moves them to the device."""

    def stop(*arguments):
        raise Stages(arguments[-1])

    pipeline_parallel.pipeline_module_split = stop
    try:
        pipeline_parallel.pipeline_llm(None, dims, config, None, model, None, None)
    except Stages as stages:
        return stages.args[0]


def layout_of(path, num_devices):
    config = ConfigManager().parse_args(["--job.config_file", path])
    parallelism, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=num_devices,
    )
    model = model_of(config, Path(path).parent)
    check_parallelism(model, dims, config)
    replicas = dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size % (training.local_batch_size * replicas) == 0
    accumulation = training.global_batch_size // (training.local_batch_size * replicas)
    micro_batch, vpp = training.local_batch_size, 1
    if dims.pp > 1:
        micro_batch = parallelism.pipeline_parallel_microbatch_size
        assert training.local_batch_size % micro_batch == 0
        accumulation *= training.local_batch_size // micro_batch
        per_stage = parallelism.pipeline_parallel_layers_per_stage
        less = (
            parallelism.pipeline_parallel_first_stage_less_layers,
            parallelism.pipeline_parallel_last_stage_less_layers,
        )
        parts = stages_of(model, dims, config)
        vpp = len(parts) // dims.pp
        (modules,) = pipeline_parallel.generate_llm_fqn_per_model_part(1, model.n_layers)
        check_stages(parts, modules, per_stage, *less)
        name = parallelism.pipeline_parallel_schedule
        assert (name in ("Interleaved1F1B", V_SCHEDULE)) == (vpp > 1)
        build = pipeline_parallel.build_pipeline_schedule
        build_schedule(build, dims.pp, vpp, name, job_config=config)
    block = TransformerBlock(0, model)
    return {
        "tp": dims.tp,
        "pp": dims.pp,
        "dp": replicas,
        "is_sharded": dims.dp_shard > 1,
        "vpp": vpp,
        "micro_batch_size": micro_batch,
        "num_microbatches": accumulation,
        "recompute": config.activation_checkpoint.mode,
        "precision": {"bfloat16": "bf16", "float32": "fp32"}[training.mixed_precision_param],
        "seq_length": training.seq_len,
        "num_layers": model.n_layers,
        "hidden_size": model.dim,
        "ffn_hidden_size": block.feed_forward.w1.out_features,
        "num_heads": model.n_heads,
        "num_kv_heads": model.n_kv_heads,
        "vocab_size": model.vocab_size,
        "norm_epsilon": block.ffn_norm.eps,
        "rotary_base": model.rope_theta,
        **asked_fields(path, config),
        "seed": config.debug.seed,
    }


print_answers(layout_of, ValueError, TypeError, AssertionError, RuntimeError, SystemExit)
