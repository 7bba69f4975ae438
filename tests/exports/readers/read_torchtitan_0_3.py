"""Reads exported modules with torchtitan's own parser (0.3, or main by hand); prints JSON."""

import inspect
import sys
from pathlib import Path

from answers import asked_fields, print_answers, stand_in
from titan_stages import build_schedule, check_stages

# Triton (1 GB) is imported for kernels of mixtures of experts alone, the others for figures.
stand_in("torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard", "wandb")

import torchtitan.trainer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.distributed.pipeline_parallel import (  # noqa: E402
    _build_pipeline_schedule,
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
)


class ChecksArePassedError(Exception):
    """The trainer goes on to what needs its device."""


def check_trainer(config, dims):
    """Makes the trainer as far as its checks go, with the degrees and without the device."""

    def goes_on(*_args):
        raise ChecksArePassedError

    trainer = torchtitan.trainer
    trainer.utils.get_local_device = lambda: None
    trainer.utils.device_module.set_device = lambda _device: None
    trainer.Trainer.init_distributed = lambda _trainer: dims
    trainer.dist_utils.set_spmd_backend = goes_on
    try:
        trainer.Trainer(config)
    except ChecksArePassedError:
        return
    raise AssertionError("the trainer has other checks than this reader knows")


def config_of(path):
    """The configuration as `torchtitan.train --module torchtitan_layout --config layout` has it."""
    folder = str(Path(path).parent)
    sys.path.insert(0, folder)
    sys.modules.pop("torchtitan_layout", None)
    try:
        return ConfigManager().parse_args(["--module", "torchtitan_layout", "--config", "layout"])
    finally:
        sys.path.remove(folder)


def batch_of(config, dims, replicas):
    """Micro-batch and accumulation: sequences in 0.3, tokens on the main branch."""
    training, parallelism = config.training, config.parallelism
    if hasattr(training, "seq_len"):
        length = training.seq_len
        micro_batch = training.local_batch_size
        if dims.pp > 1:
            micro_batch = parallelism.pipeline_parallel_microbatch_size
        step = training.global_batch_size
        assert step % (training.local_batch_size * replicas) == 0
    else:
        length = training.max_context_length
        micro_batch = training.num_tokens_per_microbatch_per_dp_rank // length
        step = training.num_tokens_per_train_step // length
        assert training.num_tokens_per_train_step % (micro_batch * length) == 0
        if dims.pp > 1:
            assert step == micro_batch * parallelism.num_pp_microbatches * replicas
    assert step % (micro_batch * replicas) == 0
    return length, micro_batch, step // (micro_batch * replicas)


def virtual_stages(config, dims, model):
    """Stages a rank, all of which must have the same number of layers."""
    if dims.pp == 1:
        return 1
    parallelism = config.parallelism
    metadata = _get_pipeline_metadata(dims, parallelism, model)
    _stages, num_layers, *less = metadata
    parts = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(*metadata)
    vpp = len(parts) // dims.pp
    (modules,) = _generate_llm_fqn_per_model_part(1, num_layers)
    check_stages(parts, modules, parallelism.pipeline_parallel_layers_per_stage, *less)
    known = {
        "local_batch_size": getattr(config.training, "local_batch_size", 0),
        "num_microbatches": getattr(parallelism, "num_pp_microbatches", 0),
    }
    asked = inspect.signature(_build_pipeline_schedule).parameters  # 0.3 and main differ
    batch = {name: value for name, value in known.items() if name in asked}
    name = parallelism.pipeline_parallel_schedule
    build_schedule(_build_pipeline_schedule, dims.pp, vpp, name, parallelism=parallelism, **batch)
    return vpp


def layout_of(path, num_devices):
    config = config_of(path)
    type(config).__post_init__(config)  # what torchtitan checks when a configuration is made
    parallelism = config.parallelism
    dims = ParallelDims.from_config(parallelism, num_devices)
    check_trainer(config, dims)
    model = config.model_spec.model
    config.model_spec.model.update_from_config(config=config)
    block = model.layers[0]
    replicas = dims.dp_replicate * dims.dp_shard
    length, micro_batch, accumulation = batch_of(config, dims, replicas)
    return {
        "tp": dims.tp,
        "pp": dims.pp,
        "dp": replicas,
        "is_sharded": dims.dp_shard > 1,
        "vpp": virtual_stages(config, dims, model),
        "micro_batch_size": micro_batch,
        "num_microbatches": accumulation,
        "recompute": "full" if isinstance(config.activation_checkpoint, FullAC.Config) else "none",
        "sequence_parallel": parallelism.enable_sequence_parallel,
        "precision": {"bfloat16": "bf16", "float32": "fp32"}[config.training.mixed_precision_param],
        "seq_length": length,
        "num_layers": len(model.layers),
        "hidden_size": model.dim,
        "ffn_hidden_size": block.feed_forward.w1.out_features,
        "num_heads": block.attention.n_heads,
        "num_kv_heads": block.attention.n_kv_heads,
        "vocab_size": model.vocab_size,
        "tied_embeddings": model.enable_weight_tying,
        "norm_epsilon": block.ffn_norm.eps,
        "rotary_base": block.attention.rope.theta,
        "seed": config.debug.seed,
        **asked_fields(path, config),
    }


print_answers(
    layout_of,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    SystemExit,
)
