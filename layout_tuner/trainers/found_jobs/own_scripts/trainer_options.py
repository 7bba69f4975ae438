"""Options of Hugging Face's Trainer, and of scripts that name theirs alike.

Names and defaults are those of `training_args.py` of transformers 4.57 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.trainers.accelerate import MIXED_PRECISION
from layout_tuner.trainers.found_jobs.found_job import Findings, Stated
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    ADAM,
    AUTO,
    NOT_ADAM,
    Statements,
    assume_rest,
    configuration_named,
    is_on,
    miss,
    names,
    note,
    note_choice,
    note_count,
    statements_of,
    whole_number,
)
from layout_tuner.trainers.found_jobs.positioned import positioned

TRAINER_MARKS: Final = ("per_device_train_batch_size", "per_gpu_train_batch_size")
"""Trainer's options of the batch, which other scripts take over."""
_OF_TRAINER: Final = names(
    """save_strategy evaluation_strategy eval_strategy do_train save_total_limit logging_strategy
    overwrite_output_dir bf16 fp16 tf32 fsdp deepspeed remove_unused_columns optim save_safetensors
    ddp_find_unused_parameters ddp_timeout load_best_model_at_end
    auto_find_batch_size torch_compile"""
)
"""Options that other scripts seldom have beside `TRAINER_MARKS`: Trainer reads them."""
OTHER_DEFAULTS: Final = names(
    """finetuning_type cutoff_len packing padding_free dataset_text_field assistant_only_loss
    completion_only_loss max_prompt_length max_completion_length num_generations eos_token"""
)
"""Options of programs on top of Trainer (LLaMA-Factory, TRL) with other defaults than its own."""

_COUNTS: Final = {
    "micro_batch_size": (
        *(*TRAINER_MARKS, "micro_batch_size", "train_micro_batch_size_per_gpu"),
        *("micro_train_batch_size", "per_device_batch_size"),
    ),
    "num_microbatches": ("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps"),
    "global_batch_size": ("global_batch_size", "global_train_batch_size"),
    "model.seq_length": (
        *("max_seq_length", "max_seq_len", "seq_length", "sequence_length"),
        *("block_size", "model_max_length", "max_length", "seq_len", "max_len"),
    ),
}
"""Fields by the options that state them, the first one counts."""
_MODEL_NAMES: Final = (
    *("config_name", "model_name_or_path", "pretrained_model_name_or_path", "model_name"),
    *("model_id", "model_path", "model", "pretrain"),
)
_SUGGESTS: Final = {
    "tp": r"tensor_(model_)?parallel|^model_parallel|(^|_)tp($|_)|autotp",
    "pp": r"pipeline|^pp($|_)|num_stages|virtual_stage",
    "cp": r"(context|sequence|seq)_parallel|ulysses|ring_attention|^[cs]p($|_)",
    "ep": r"expert_(model_|tensor_)?parallel|^ep($|_size|_world)",
    "dp": r"data_parallel|^dp($|_)",
    "zero_stage": r"zero_?[0-3]|zero_(stage|opt)|fsdp|sharding|distributed_optimizer|deepspeed",
    "recompute": r"recomput|checkpoint_(activ|layer|num)|activation_(ch|mem)|grad.*_checkpoint",
    "precision": r"bf16|fp16|fp8|fp32|precision|dtype|(^|_)amp($|_)",
    "micro_batch_size": r"batch_?size|(^|_)(mbs|gbs|bs)($|_)",
    "num_microbatches": r"accum|micro_?batches",
    "num_nodes": r"^(num_|n)?nodes$|num_machines",
    "num_devices": r"num_processes|world_size|^(num_|n_?)?gpus$",
    "model.seq_length": r"seq(uence)?_?len|max_len|context_len|ctx_len",
}
"""Fields by what options are named that may set them, in a way that no reader knows."""
_OF_EVALUATION: Final = re.compile(
    r"(^|_)(eval|val|valid|validation|test|infer|inference|generation)(_|$)"
)

FSDP_STRATEGIES: Final = {
    word: what
    for words, what in {
        "full_shard 1": (3, False),
        "shard_grad_op 2": (2, False),
        "no_shard 3": (0, False),
        "hybrid_shard 4": (3, True),
        "hybrid_shard_zero2 5": (2, True),
    }.items()
    for word in words.split()
}
"""torch's `ShardingStrategy` by name and number: the ZeRO stage, and whether each node has a copy
of what is sharded."""

_OFF: Final = (None, False, 0, 1, "1", "none", "None", "no", "fp32", "")
"""Values of options without effect; degrees are 1 then."""
_LISTED: Final = {
    name: why
    for why, options in {
        "adapters alone may be trained": "lora_r lora_rank lora_dim lora_alpha lora_target",
        "adapters alone are trained": (
            "use_lora use_peft use_peft_lora lora_enable q_lora qlora adapter"
        ),
        "weights are in 4 bits": "load_in_4bit",
        "weights are in 8 bits": "load_in_8bit",
        "weights are quantized": "quantization_bit",
        "torch.compile changes the step, which no knob here says": (
            "torch_compile torch_compile_backend torch_compile_mode"
        ),
        "kernels of Liger save memory of the loss": "use_liger_kernel enable_liger_kernel",
        "noise is added to embeddings": "neftune_noise_alpha",
        "states leave the device": "offload cpu_offload offload_adam",
        "it trains on CPU cores": "use_cpu no_cuda",
    }.items()
    for name in options.split()
}
"""Options that no layout says, unless they are off: why they matter."""

_IRRELEVANT: Final = names(
    """output_dir overwrite_output_dir do_train do_eval do_predict num_train_epochs num_epochs
    max_steps epochs num_train_steps train_steps learning_rate lr weight_decay max_grad_norm beta1
    beta2 optim_args seed data_seed run_name report_to project_name wandb_project entity token
    cache_dir trust_remote_code disable_tqdm load_best_model_at_end metric_for_best_model
    greater_is_better remove_unused_columns group_by_length length_column_name label_names
    include_tokens_per_second include_num_input_tokens_seen ignore_data_skip full_determinism
    local_rank deepspeed_port prediction_loss_only past_index skip_memory_metrics debug
    use_fast_tokenizer use_slow_tokenizer use_auth_token model_revision
    chat_template preprocessing_num_workers overwrite_cache streaming
    flash_attn use_flash_attn use_flash_attention use_flash_attention_2 flash_attention
    attn_implementation use_cache torch_empty_cache_steps average_tokens_across_devices
    accelerator_config auto_wrap ddp half_precision_backend fp16_opt_level fp16_full_eval
    bf16_full_eval text_column train_sampling_strategy low_cpu_mem_usage
    gradient_checkpointing_kwargs activation_checkpointing_kwargs fsdp_min_num_params fp16_backend
    fsdp_transformer_layer_cls_to_wrap max_shard_size print_loss master_port master_addr yes no_save_model verbose jit_mode_eval
    per_device_eval_batch_size per_gpu_eval_batch_size tokens"""
)
_IRRELEVANT_PREFIXES: Final = names(
    """logging_ log_ eval save_ hub_ push_to_hub adam_ lr_ warmup dataset data_ dataloader_ ddp_
    preprocess train_file train_data validation test_ label_ tokenizer predict generation gen_
    max_train_ max_eval_ max_predict_ max_samples resume restore_ trackio ray_ tpu_ wandb_ tensorboard
    checkpoint num_workers val_ instruction prompt"""
)


def is_read_by_trainer(stated: Mapping[str, Stated]) -> bool:
    """Whether Trainer reads options, so that its defaults count where one is absent."""
    is_other = OTHER_DEFAULTS & set(stated)
    return bool(set(TRAINER_MARKS) & set(stated) and _OF_TRAINER & set(stated) and not is_other)


def note_trainer(findings: Findings, stated: Mapping[str, Stated], file: JobFile) -> str:
    """Notes what options say of the batch, the precision, FSDP and recomputation.

    Returns:
        The name of the model; empty: none is stated.
    """
    left = Statements(stated)
    for name, options in _COUNTS.items():
        given = [each for option in options if (each := left.take(option)) is not None]
        if len({whole_number(each) for each in given}) > 1:
            said = " ".join(each.said for each in given)
            findings.miss(said, "they do not say the same", name=name, line=given[0].line)
        elif given:
            note_count(findings, name, given[0])
    if (each := left.take("batch_size", "train_batch_size")) is not None:
        is_open = findings.value("micro_batch_size") is None
        why = "it may be of a rank or of all"
        miss(findings, each, why, name="micro_batch_size" if is_open else "")
    if (each := left.take("auto_find_batch_size")) is not None and is_on(each) is not False:
        miss(findings, each, "Trainer lowers it until it fits", name="micro_batch_size")
    _note_precision(findings, left)
    _note_recomputation(findings, left)
    _note_fsdp(findings, left, file)
    note_choice(findings, "zero_stage", left.take("zero_stage"), {str(n): n for n in range(4)})
    for name, why in _LISTED.items():
        each = left.take(name)
        if each is not None and (each.value is True or each.value not in _OFF):
            miss(findings, each, why)
    _list_kinds(findings, left)
    model = left.take(*_MODEL_NAMES)
    _note_suggestions(findings, left)
    left.list_rest(findings, _IRRELEVANT, _IRRELEVANT_PREFIXES)
    if model is not None and model.unknown:
        miss(findings, model, model.unknown)
    return str(model.value) if model is not None and model.value else ""


def _note_suggestions(findings: Findings, left: Statements) -> None:
    """Leaves fields open that options of unknown meaning may set."""
    for option, stated in left.rest():
        if option in _IRRELEVANT or _OF_EVALUATION.search(option):
            continue
        is_off = not stated.unknown and stated.value is not True and stated.value in _OFF
        for name, pattern in _SUGGESTS.items():
            if re.search(pattern, option):
                left.take(option)
                if not is_off:
                    is_open = name not in findings.read
                    why = "what the script does with it is not known"
                    miss(findings, stated, why, name=name if is_open else "")
                break


def assume_trainer(findings: Findings) -> None:
    """Trainer's defaults, where neither options nor configurations say anything else."""
    assume_rest(findings, "micro_batch_size", 8, "Trainer's default of per_device_train_batch_size")
    if findings.value("global_batch_size") is None:
        assume_rest(findings, "num_microbatches", 1, "Trainer's default")
    assume_rest(findings, "precision", "fp32", "Trainer's default without --bf16 and --fp16")
    assume_rest(findings, "recompute", "none", "Trainer's default without --gradient_checkpointing")


def _note_precision(findings: Findings, left: Statements) -> None:
    types = {name: left.take(name) for name in ("bf16", "fp16")}
    weights = left.take("torch_dtype", "dtype", "model_dtype")
    tf32 = left.take("tf32")
    note_choice(findings, "precision", left.take("mixed_precision"), MIXED_PRECISIONS)
    for name, each in types.items():
        switch = is_on(each)
        if each is None or switch is False:
            continue
        if switch is None:
            why = "it depends on the device" if each.value == AUTO else "it is not a switch"
            miss(findings, each, why, name="precision")
        elif findings.value("precision") in (None, name):
            note(findings, "precision", each, name)
        else:
            miss(findings, each, "another type is on, too", name="precision")
    if weights is not None and str(weights.value).rpartition(".")[2] not in (
        "float32",
        "fp32",
        AUTO,
    ):
        is_open = findings.value("precision") is None
        why = "weights are loaded in this type, and the script may train in it"
        miss(findings, weights, why, name="precision" if is_open else "")
    if is_on(tf32) and findings.value("precision") is None and not findings.is_open("precision"):
        assert tf32 is not None
        miss(findings, tf32, "fp32 here is without TF32", name="precision")


MIXED_PRECISIONS: Final = {
    **{written: precision for precision, written in MIXED_PRECISION.items()},
    **dict.fromkeys(("false", "fp32"), "fp32"),
}
"""Accelerate's `mixed_precision`; YAML reads `no` without quotes as false."""


def _note_recomputation(findings: Findings, left: Statements) -> None:
    off = left.take("disable_gradient_checkpointing", "no_gradient_checkpointing")
    for each in (left.take("gradient_checkpointing"), left.take("activation_checkpointing")):
        switch = is_on(each)
        if each is None:
            continue
        if switch is None:
            miss(findings, each, "it is not a switch", name="recompute")
        else:
            note(findings, "recompute", each, "full" if switch else "none")
    if off is not None:
        note(findings, "recompute", off, "none" if is_on(off) else "full")


def _note_fsdp(findings: Findings, left: Statements, file: JobFile) -> None:
    fsdp, config = left.take("fsdp"), left.take("fsdp_config")
    if fsdp is None or is_on(fsdp) is False or not fsdp.value:
        if fsdp is not None and fsdp.unknown:
            miss(findings, fsdp, fsdp.unknown, name="zero_stage")
        return
    words = str(fsdp.value).lower().split()
    strategies = [each for each in words if each in FSDP_STRATEGIES]
    if "offload" in words:
        miss(findings, fsdp, "weights leave the device")
    settings = _fsdp_settings(findings, config, file)
    if len(strategies) == 1:
        note_fsdp_strategy(findings, fsdp, strategies[0])
    elif is_on(fsdp) or "auto_wrap" in words:
        reshard = settings.take("reshard_after_forward")
        note(findings, "zero_stage", fsdp, 2 if reshard and is_on(reshard) is False else 3)
    else:
        miss(findings, fsdp, "it is no sharding strategy", name="zero_stage")
    recompute = settings.take("activation_checkpointing")
    if recompute is not None and is_on(recompute):
        note(findings, "recompute", recompute, "full")


def _fsdp_settings(findings: Findings, config: Stated | None, file: JobFile) -> Statements:
    """The keys of Trainer's `fsdp_config`, with and without fsdp_ before them."""
    if config is None:
        return Statements({})
    text = config.value if isinstance(config.value, str) else ""
    if text.lstrip().startswith("{"):
        found = ("fsdp_config", positioned(JobFile(name="fsdp_config.json", text=text)))
    elif (named := configuration_named(file, config)) is not None:
        found = named
    else:
        miss(findings, config, "the file is not beside it", name="recompute")
        return Statements({})
    keys = statements_of(found[1], named=found[0])
    return Statements({name.removeprefix("fsdp_"): each for name, each in keys.items()})


def note_fsdp_strategy(findings: Findings, stated: Stated, word: Any) -> None:
    """Notes the stage and the copies of a sharding strategy."""
    found = FSDP_STRATEGIES.get(str(word).lower())
    if found is None:
        miss(findings, stated, "it is no sharding strategy", name="zero_stage")
        return
    stage, has_copies = found
    note(findings, "zero_stage", stated, stage)
    per_node = findings.value("devices_per_node")
    if not has_copies:
        findings.assume("zero_replicas", 1, "the strategy shards over all replicas")
    elif per_node is None:
        why = "each node has a copy, and its devices are not known"
        miss(findings, stated, why, name="zero_replicas")
    else:
        note(findings, "zero_group_size", stated, per_node)


def _list_kinds(findings: Findings, left: Statements) -> None:
    optimizer = left.take("optim", "optimizer")
    if optimizer is not None and not ADAM.fullmatch(str(optimizer.value)):
        miss(findings, optimizer, NOT_ADAM)
    stage = left.take("stage")
    if stage is not None:
        is_open = whole_number(stage) and "zero_stage" not in findings.read
        miss(findings, stage, "it may be ZeRO's", name="zero_stage" if is_open else "")
    attention = left.take("attn_implementation", "flash_attn")
    if attention is not None and attention.value in ("eager", "disabled", False):
        miss(findings, attention, "scores of attention are stored: state attention=unfused")
