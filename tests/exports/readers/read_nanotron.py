"""Reads exported files with nanotron's own loader, and prints layouts and models as JSON."""

import importlib
import sys
import types
from dataclasses import asdict

from answers import print_answers

# nanotron 0.4 cannot be imported by its parts: its logging imports its configuration, and the
# other way round. Stubs stand for the configuration while logging is imported.
stub, inner = types.ModuleType("nanotron.config"), types.ModuleType("nanotron.config.config")
stub.LoggingArgs = inner.LoggingArgs = object
stub.__path__ = []
sys.modules |= {"nanotron.config": stub, "nanotron.config.config": inner}
importlib.import_module("nanotron.logging")
del sys.modules["nanotron.config"], sys.modules["nanotron.config.config"]

import dacite  # noqa: E402
from nanotron.config import get_config_from_file  # noqa: E402
from nanotron.parallel.pipeline_parallel.engine import (  # noqa: E402
    OneForwardOneBackwardPipelineEngine,
)
from nanotron.parallel.tensor_parallel.nn import TensorParallelLinearMode  # noqa: E402


def layout_of(path, _num_devices):
    config = get_config_from_file(path)
    parallelism, tokens = config.parallelism, config.tokens
    assert isinstance(parallelism.pp_engine, OneForwardOneBackwardPipelineEngine)
    model = asdict(config.model.model_config)
    return {
        "tp": parallelism.tp,
        "pp": parallelism.pp,
        "dp": parallelism.dp,
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


print_answers(layout_of, ValueError, TypeError, dacite.DaciteError)
