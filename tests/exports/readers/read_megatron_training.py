"""Parses and checks arguments with Megatron-LM's own program, and prints the layouts as JSON.

Since 0.17 megatron-core's package has it. Each file is a JSON list of arguments. The device is said
to be an H100.
"""

import json
import os
import sys
from pathlib import Path

import torch
from answers import print_answers
from read_megatron_core import described

from megatron.training import arguments  # isort: skip - after what stands for its imports

torch.cuda.get_device_capability = lambda *_: (9, 0)
arguments.get_device_arch_version = lambda: 9

OTHERS = (
    *("--mock-data", "--train-iters", "10", "--eval-iters", "0"),
    *("--lr", "1e-4", "--min-lr", "1e-5", "--lr-decay-style", "constant"),
    "--no-rope-fusion",  # needs Transformer Engine
)
"""Data and learning rate as the launch script has them, and what a CPU lacks."""


def layout_of(path, num_devices):
    words = json.loads(Path(path).read_text())
    os.environ |= {"WORLD_SIZE": str(num_devices), "RANK": "0"}
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if "--use-megatron-fsdp" in words:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]  # as in the launch script
    sys.argv = ["pretrain_gpt.py", *words, *OTHERS]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    step = args.micro_batch_size * args.data_parallel_size
    return described(arguments.core_transformer_config_from_args(args)) | {
        "dp": args.data_parallel_size,
        "cp": args.context_parallel_size,
        "num_microbatches": args.global_batch_size // step,
    }


print_answers(layout_of, ValueError, AssertionError, TypeError, SystemExit)
