"""Reads exported files with nanotron's own loader, cuts its model, and prints JSON.

flash-attn, which needs a GPU, has stand-ins. Only the stages without layers are built: the others
need the device.
"""

import contextlib
import importlib
import sys
import types
from dataclasses import asdict

from answers import print_answers, stand_in

# nanotron 0.4 cannot be imported by its parts: its logging imports its configuration, and the
# other way round. Stubs stand for the configuration while logging is imported.
stub, inner = types.ModuleType("nanotron.config"), types.ModuleType("nanotron.config.config")
stub.LoggingArgs = inner.LoggingArgs = object
stub.__path__ = []
sys.modules |= {"nanotron.config": stub, "nanotron.config.config": inner}
importlib.import_module("nanotron.logging")
del sys.modules["nanotron.config"], sys.modules["nanotron.config.config"]
stand_in(
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn.ops",
    "flash_attn.ops.triton",
    "flash_attn.ops.triton.layer_norm",
)

import dacite  # noqa: E402
import torch  # noqa: E402
from nanotron.config import get_config_from_file  # noqa: E402
from nanotron.models import base, llama  # noqa: E402
from nanotron.parallel.pipeline_parallel import block, engine  # noqa: E402
from nanotron.parallel.pipeline_parallel.engine import (  # noqa: E402
    AllForwardAllBackwardPipelineEngine,
    OneForwardOneBackwardPipelineEngine,
)
from nanotron.parallel.tensor_parallel.nn import TensorParallelLinearMode  # noqa: E402

SCHEDULES = {
    OneForwardOneBackwardPipelineEngine: "1f1b",
    AllForwardAllBackwardPipelineEngine: "gpipe",
}


class Group:
    """A process group of so many ranks, for code that asks for its size."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def layers_of_stages(config):
    """The number of layers of each stage; nanotron's own check of those that have none."""
    parallelism = config.parallelism
    groups = {f"{axis}_pg": Group(getattr(parallelism, axis)) for axis in ("tp", "pp", "dp")}
    context = types.SimpleNamespace(**groups, world_pg=None)
    base.log_rank = llama.log_rank = lambda *_args, **_kwargs: None
    llama.P2P = lambda pg, device: types.SimpleNamespace(pg=pg)  # has tensors on the device

    def built(rank):
        ranks = types.SimpleNamespace(get_rank=lambda _group=None: rank)
        base.dist = block.dist = engine.dist = ranks
        shape = config.model.model_config
        return base.build_model(
            model_builder=lambda: llama.LlamaForTraining(shape, context, parallelism),
            parallel_context=context,
            dtype=config.model.dtype,
            device=torch.device("meta"),
        )

    model = built(None)  # no rank's: nothing is made
    stages = [[] for _ in range(parallelism.pp)]
    for module in model.modules():
        if isinstance(module, block.PipelineBlock):
            stages[module.rank].append(getattr(module.module_builder, "__name__", ""))
    light = {"<lambda>", "Loss"}
    for rank, blocks in enumerate(stages):
        if set(blocks) <= light:
            base.check_model_has_grad(built(rank), context)
    return [blocks.count("LlamaDecoderLayer") for blocks in stages]


def layout_of(path, _num_devices):
    config = get_config_from_file(path)
    parallelism, tokens = config.parallelism, config.tokens
    stages = layers_of_stages(config)
    # Its check of the number of micro-batches is the first statement of a step, which an empty
    # batch ends.
    with contextlib.suppress(AttributeError, TypeError):
        parallelism.pp_engine.train_batch_iter(
            model=None,
            pg=Group(parallelism.pp),
            batch=[],
            nb_microbatches=tokens.batch_accumulation_per_replica,
            grad_accumulator=None,
        )
    model = asdict(config.model.model_config)
    return {
        "tp": parallelism.tp,
        "pp": parallelism.pp,
        "dp": parallelism.dp,
        "schedule": SCHEDULES[type(parallelism.pp_engine)],
        "stages": stages,
        "micro_batch_size": tokens.micro_batch_size,
        "num_microbatches": tokens.batch_accumulation_per_replica,
        "global_batch_size": config.global_batch_size,
        "zero_stage": config.optimizer.zero_stage,
        "sequence_parallel": parallelism.tp_mode is TensorParallelLinearMode.REDUCE_SCATTER,
        "precision": {"torch.bfloat16": "bf16"}[str(config.model.dtype)],
        "seq_length": tokens.sequence_length,
        "num_layers": model["num_hidden_layers"],
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["intermediate_size"],
        "num_heads": model["num_attention_heads"],
        "num_kv_heads": model["num_key_value_heads"],
        "vocab_size": model["vocab_size"],
        "norm_epsilon": model["rms_norm_eps"],
        "tied_embeddings": model["tie_word_embeddings"],
    }


print_answers(layout_of, ValueError, TypeError, AssertionError, dacite.DaciteError)
