"""Reads exported files as `accelerate launch` does, and prints the layouts as JSON."""

import os
from types import SimpleNamespace

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env
from answers import print_answers

PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def check_groups(args):
    """Makes the groups of FSDP 2 from the environment of the ranks, and checks them."""
    for key in [key for key in os.environ if "PARALLELISM" in key]:
        del os.environ[key]  # the last file's, which the environment of ranks would inherit
    environment = prepare_multi_gpu_env(args)
    os.environ |= {key: value for key, value in environment.items() if "PARALLELISM" in key}
    accelerator = SimpleNamespace(
        multi_device=True,
        num_processes=args.num_processes,
        is_fsdp2=environment["FSDP_VERSION"] == "2",
        is_main_process=False,
    )
    groups = ParallelismConfig()
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        groups._validate_accelerator(accelerator)
    return {"dp": args.num_processes, "zero_replicas": groups.dp_replicate_size}


def layout_of(path, _num_devices):
    config = load_config_from_file(path)
    flags = ["--config_file", path]
    for section in ("megatron_lm_config", "deepspeed_config"):
        for key, value in getattr(config, section).items():
            flags += [f"--{key}", str(value)]  # accelerate checks the names of flags alone
    launch_command_parser().parse_args([*flags, "train.py"])
    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args, _defaults, _from_config = _validate_launch_command(args)
    layout = {
        "num_nodes": args.num_machines,
        "num_devices": args.num_processes,
        "precision": PRECISIONS[args.mixed_precision],
    }
    if args.use_megatron_lm:
        environment = prepare_multi_gpu_env(args)
        told = {
            key: environment.get(f"MEGATRON_LM_{key}")
            for key in ("RECOMPUTE_GRANULARITY", "CONTEXT_PARALLEL_SIZE", "SEQUENCE_PARALLELISM")
        }
        tp, pp = args.megatron_lm_tp_degree, args.megatron_lm_pp_degree
        cp = int(told["CONTEXT_PARALLEL_SIZE"])
        layout |= {
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "dp": args.num_processes // (tp * pp * cp),
            "num_microbatches": int(environment["MEGATRON_LM_NUM_MICRO_BATCHES"]),
            "zero_stage": int(environment["MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER"] == "True"),
            "recompute": told["RECOMPUTE_GRANULARITY"],
            "sequence_parallel": told["SEQUENCE_PARALLELISM"] == "True",
        }
    elif args.use_deepspeed:
        layout |= {
            "dp": args.num_processes,
            "zero_stage": args.zero_stage,
            "num_microbatches": args.gradient_accumulation_steps,
        }
    elif args.use_fsdp:
        layout |= check_groups(args)
    else:
        layout |= {"dp": args.num_processes, "zero_stage": 0}
        assert bool(args.multi_gpu) == (args.num_processes > 1)
    return layout


print_answers(layout_of, ValueError, TypeError, yaml.YAMLError, SystemExit)
