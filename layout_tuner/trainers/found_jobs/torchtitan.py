"""torchtitan's TOML files and command lines, up to 0.2.

Sources: torchtitan 0.2.2 (`config/job_config.py`, `train.py`, `distributed/`,
`models/llama3/infra/parallelize.py`) and its revisions since April 2024, in which some keys stood
in other sections. Since 0.3 a configuration is a Python function, which is not executed: of such a
job the command line alone is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import split_of, split_of_ends
from layout_tuner.search_spaces.layouts.pipeline_layout import layout_text
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import (
    JOB,
    MODEL,
    FoundJob,
    JobFileInvalidError,
    Stated,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import TrainerDefaults, note_settings
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    StatedValues,
    default_of,
    options_by_name,
    stated_beside,
    statements_of,
)
from layout_tuner.trainers.found_jobs.positioned import plain_value, root_of
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, options_of
from layout_tuner.trainers.found_jobs.torchtitan_flavors import (
    FLAVORS,
    OTHER_MODELS,
    SAME_ATTENTION,
    shape_of_flavor,
)
from layout_tuner.trainers.knobs.torchtitan import TORCHTITAN_0_2_KNOBS
from layout_tuner.trainers.torchtitan import (
    BY_OPERATOR,
    DEGREE_KEYS,
    FLOAT8,
    REPLICATE,
    RESHARD,
    ROTATE_METHODS,
    SCHEDULES,
    SHARD,
    stage_layers,
)

_PLACES: Final = ("parallelism", "experimental", "training")
"""Sections in which degrees stood, the newest first."""
_OLD_FLOAT8: Final = (
    *("float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear"),
)
_OLD_KEYS: Final = ("training.batch_size", "training.compile", *_OLD_FLOAT8)
"""Keys of releases before 0.2, as are degrees outside `[parallelism]`."""
_IGNORED: Final = (
    *("job.", "profiling.", "metrics.", "optimizer.", "lr_scheduler.", "checkpoint.", "comm."),
    *("memory_estimation.", "validation.", "debug.", "fault_tolerance.", "training.dataset"),
    *("training.dataloader.", "training.gc_", "quantize.", "float8.", "mx."),
)
"""Beginnings of keys that set nothing of a layout, or that are read beside others."""
_IGNORED_KEYS: Final = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "training": "max_norm steps warmup_steps seed deterministic mixed_precision_reduce "
        "enable_loss_parallel",
        "parallelism": "enable_compiled_autograd context_parallel_load_balancer "
        "pipeline_parallel_expert_parallel_overlap",
        "model": "hf_assets_path tokenizer_path print_after_conversion",
        "activation_checkpoint": "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop debug "
        "visualize_memory_budget_pareto preserve_rng_state determinism_check",
        "compile": "backend",
        "experimental": "custom_args_module enable_compiled_autograd pipeline_parallel_split_mode",
    }.items()
    for key in keys.split()
)
_OF_MAIN: Final = ("training.num_tokens_", "training.max_context_length")
"""Options of the main branch, which counts tokens where 0.3 counts sequences."""
_SCRIPT: Final = "run_train.sh"
"""torchtitan's own launch script; its variables have the keys of options."""
_VARIABLES: Final = {
    "CONFIG_FILE": "job.config_file",
    "MODULE": "module",
    "CONFIG": "config",
    "NGPU": "devices_per_node",
}
_SINGLE: Final = {name.lower(): ours for ours, name in SCHEDULES.items()}
"""Schedules of one stage a rank, in small letters."""
_EXPERIMENT: Final = re.compile(
    r"(?:simple_fsdp\.|compiler_toolkit\.)?(?P<name>\w+?)(?:_simple_fsdp|_ft)?"
)
"""A model under experiments of torchtitan that leave layout and shape as they are."""
_MX: Final = ("quantize.linear.mx", "quantize.dense.mx", "mx")
_EIGHT_BIT: Final = (FLOAT8, "quantize.dense.float8", "float8", *_MX)
"""Converters of linear layers; the sections of their settings have the same names."""
_NO_PYTHON: Final = (SyntaxError, RecursionError, MemoryError)
_LEFT_OUT: Final = (
    *("output", "router.gate", "attention.wk", "attention.wv", "auto_filter_small_kn"),
)
"""Modules that fp8 here leaves out, too, or that are a small part of a layer's products."""


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The job of a TOML file; None: it is another format.

    Raises:
        JobFileInvalidError: the file is malformed or Python, or a value is none that torchtitan
            takes.
    """
    if file.name.endswith(".py") and "torchtitan" in file.text:
        raise JobFileInvalidError(
            f"{file.name}: torchtitan's configurations since 0.3 are Python, which is not executed; "
            "give a TOML file of 0.2, or a script whose options state the job"
        )
    root = root_of(file, ".toml")
    keys = ("parallelism", "model.flavor", "training.seq_len")
    if root is None or not any(root.get(key) for key in keys):
        return None
    return (job_of(statements_of(root), file),)


def read_command(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """The job of a command that starts torchtitan; None: it starts another program.

    Options count before the file of `--job.config_file`, which is read where it lies beside.
    """
    stated = dict(map(_setting, options_by_name(options_of(command.words[1:])).items()))
    program = command.program.rpartition("/")[2]
    if program not in ("torchtitan.train", _SCRIPT) and "job.config_file" not in stated:
        return None
    if program == _SCRIPT:
        for variable, key in _VARIABLES.items():
            if variable in command.environment and key not in stated:
                value = plain_value(command.environment[variable])
                stated[key] = Stated(value=value, said=f"{variable}={value}")
        if not {"job.config_file", "module"} & {*stated}:
            why = "the trainer's script reads a configuration of its own"
            stated["job.config_file"] = Stated(value=None, said=command.program, unknown=why)
    function = [stated.pop(key) for key in ("module", "config") if key in stated]
    if function:
        unread = Stated(
            value=None,
            said=" ".join(each.said for each in function),
            unknown="since 0.3 this is a Python function, which is not executed",
        )
        counts_tokens = any(key.startswith(_OF_MAIN) for key in stated)
        trainer = "torchtitan-main" if counts_tokens else "torchtitan-0.3"
        about = {"trainer": trainer, "model_name": str(function[-1].value)}
        return job_of(stated, file, unread=unread, **about)
    path = stated.pop("job.config_file", None)
    if path is None:
        return job_of(stated, file)
    of_file = stated_beside(file, path)
    if of_file is None:
        why = path.unknown or "the configuration does not lie beside the script; put it there"
        return job_of(stated, file, unread=replace(path, value=None, unknown=why))
    return job_of(of_file | stated, file)


def job_of(
    stated: Mapping[str, Stated], file: JobFile, *, unread: Stated | None = None, **about: Any
) -> FoundJob:
    """The job of a configuration.

    Args:
        stated: its values by section and key.
        file: where they stand.
        unread: what else sets values, and cannot be read; fields that are not stated are then open.
        about: other fields of `FoundJob`.

    Raises:
        JobFileInvalidError: a value is none that torchtitan takes, or two contradict each other.
    """
    job = _Job(file, stated, unread)
    job.read()
    known = {
        "file": file.name,
        "format": "torchtitan-0.2",
        "trainer": "torchtitan-0.2",
        "version": "0.1 or older" if job.is_old else "",
        "model_name": job.model_name,
    }
    return job.values.findings.job(**known | about)


def _setting(option: tuple[str, Stated]) -> tuple[str, Stated]:
    """An option as a key with its value: `section.no_key` turns a switch off."""
    name, stated = option
    section, _, key = name.rpartition(".")
    if key.startswith("no_") and stated.value is True:
        return f"{section}.{key.removeprefix('no_')}", replace(stated, value=False)
    return option


class _Job:
    """One job while it is read."""

    def __init__(self, file: JobFile, stated: Mapping[str, Stated], unread: Stated | None) -> None:
        self.values = StatedValues(file, stated, trainer="torchtitan", unread=unread)
        self.model_name = ""
        degrees = (*DEGREE_KEYS.values(), REPLICATE, SHARD, "data_parallel_degree")
        self._is_before_parallelism = any(
            f"{section}.{key}" in stated for section in _PLACES[1:] for key in degrees
        )
        self.is_old = self._is_before_parallelism or any(each in stated for each in _OLD_KEYS)
        self._file = file
        self._tp, self._pp, self._cp = (
            self.values.whole(1, *_everywhere(DEGREE_KEYS[name])) for name in ("tp", "pp", "cp")
        )
        self._replicate = self.values.whole(1, *_everywhere(REPLICATE))
        self._shard = self.values.whole(
            -1, *_everywhere(SHARD), "training.data_parallel_degree", least=-1
        )
        if self.values.word("fsdp", "training.data_parallel_type").value == "ddp":
            self._replicate, self._shard = self._shard, default_of(1)
        self._sharding = (self._shard, self._cp)
        is_known = not any(each.unknown for each in self._sharding)
        self._is_fsdp = is_known and (self._shard.value != 1 or self._cp.value > 1)

    def read(self) -> None:
        per_node = self.values.find(("devices_per_node",))
        if per_node.said and not per_node.unknown:
            self.values.put("devices_per_node", int, self.values.whole(None, "devices_per_node"))
            self.values.findings.assume("num_nodes", 1, f"{_SCRIPT} starts ranks on one node")
        self._model()
        self._degrees()
        self._batch()
        self._pipeline()
        self._experts()
        self._recompute()
        self._precision()
        self._settings()
        self._others()

    def _model(self) -> None:
        values = self.values
        values.put(f"{MODEL}seq_length", int, values.whole(2048, "training.seq_len"))
        name = values.word("llama3", "model.name")
        flavor = values.word("debugmodel", "model.flavor")
        module = values.word("", "experimental.custom_import")
        # The second one is of the fork flame.
        published = values.word("", "hf_transformers.model", "model.config")
        norm = values.word("rmsnorm", "model.norm_type")
        of = (name, flavor, module, published, norm)
        if unknown := next((each for each in of if each.unknown), None):
            values.miss(unknown, unknown.unknown, f"{MODEL}name")
            return
        if published.value:
            self.model_name = str(published.value)
            return
        fields, said, is_read = self._fields_of(str(name.value), str(flavor.value), module)
        if not fields:
            values.miss((name, flavor), f"{said}; give the model with --model", f"{MODEL}name")
            return
        note = values.findings.note if is_read else values.findings.assume
        for field, value in {"name": f"{name.value}-{flavor.value}", **fields}.items():
            note(f"{MODEL}{field}", value, said)
        if "rmsnorm" not in str(norm.value):
            values.miss(norm, "a shape of family llama has RMSNorm", f"{MODEL}family")

    def _fields_of(
        self, name: str, flavor: str, module: Stated
    ) -> tuple[Mapping[str, Any], str, bool]:
        """The fields of a shape, what states them, and whether a file does; or none, and why."""
        short = _EXPERIMENT.fullmatch(name)
        family = short["name"] if short else name
        if family == "llama" and self.is_old:  # until May 2024
            family = "llama2"
        beside = str(module.value or "").replace(".", "/")
        if beside and (found := self._file.beside(f"{beside}.py")) is not None:
            try:
                if family != "llama3":
                    raise KeyError(family)
                fields = shape_of_flavor(found.text, flavor)
            except (LookupError, TypeError, ValueError, ArithmeticError, *_NO_PYTHON):
                return (
                    {},
                    f"{found.name} does not state {flavor} by literal arguments of llama3",
                    True,
                )
            return fields, f"{found.name}: {flavor}", True
        ending = next((each for each in SAME_ATTENTION if flavor.endswith(each)), "")
        chosen = flavor.removesuffix(ending)
        # The debug model has had several shapes.
        if chosen in FLAVORS.get(family, {}) and not (self.is_old and chosen == "debugmodel"):
            return FLAVORS[family][chosen], f"torchtitan's {family} of flavor {chosen}", False
        why = OTHER_MODELS.get(family, "no such flavor of torchtitan's release is known here")
        return {}, why, False

    def _degrees(self) -> None:
        values, replicate, shard = self.values, self._replicate, self._shard
        for name, degree in (("tp", self._tp), ("pp", self._pp), ("cp", self._cp)):
            values.put(name, int, degree)
        values.put(
            "sequence_parallel",
            lambda tp: tp > 1,
            self._tp,
            shown=(),
            why="torchtitan shares the sequence over tp",
        )
        if -1 not in (replicate.value, shard.value):
            values.put("dp", lambda a, b: a * b, replicate, shard)
        policy = values.word("default", "parallelism.fsdp_reshard_after_forward")
        stages = {word: stage for stage, word in RESHARD.items()}
        stages["default"] = 3 if self._pp.value == 1 else 2
        if policy.value not in stages and not policy.unknown:
            values.miss(policy, f"it is none of {listed(list(stages), 4)}", "zero_stage")
        else:
            kept = "keeps" if stages["default"] == 2 else "frees"
            fsdp = f"torchtitan's FSDP, which {kept} gathered weights after the forward pass"
            values.put(
                "zero_stage",
                lambda word, *_: stages[word] if self._is_fsdp else 0,
                *(policy, self._pp, *self._sharding),
                shown=[policy] if self._is_fsdp else [shard],
                why=fsdp if self._is_fsdp else "torchtitan's DDP",
            )
        copies = replicate.value if self._is_fsdp else 1
        of = (replicate, *self._sharding)
        values.put("zero_replicas", lambda *_: copies, *of, shown=[replicate])
        key = "context_parallel_rotate_method"
        method = values.word("allgather", *_everywhere(key))
        if self._cp.value != 1:
            ours = {word: name for name, word in ROTATE_METHODS.items()}
            values.choice("cp_comm_type", method, ours)

    def _batch(self) -> None:
        values, pp = self.values, self._pp
        local = values.whole(8, "training.local_batch_size", "training.batch_size")
        total = values.whole(-1, "training.global_batch_size", least=-1)
        steps = values.whole(1, "training.gradient_accumulation_steps")  # of the fork flame
        size = values.whole(1, *_everywhere("pipeline_parallel_microbatch_size"))
        number = values.whole(None, *_everywhere("pipeline_parallel_microbatches"))
        has_total = not total.unknown and total.value > 0
        if has_total:
            values.put("global_batch_size", int, total)
        if pp.value == 1:
            values.put("micro_batch_size", int, local)
            if not has_total:
                why = "torchtitan accumulates no gradients without global_batch_size"
                of = (steps, total)
                values.put("num_microbatches", lambda n, _: n, *of, shown=[steps], why=why)
            return
        # Until April 2025 the number of micro-batches was stated, and pp by default.
        is_number = bool(number.said) or self._is_before_parallelism
        part = (number if number.said else pp) if is_number else size
        parts = (local, part, pp)
        if not any(each.unknown for each in parts) and local.value % part.value:
            values.refuse(
                f"the batch of {local.value} is not divisible by {part.value}: "
                f"{', '.join(each.said for each in (local, part) if each.said)}"
            )
        of_batch = "micro_batch_size" if is_number else "num_microbatches"
        of_part = "num_microbatches" if is_number else "micro_batch_size"
        values.put(of_batch, lambda a, b, _: a // b, *parts, shown=parts[:2])
        values.put(of_part, lambda _, b, __: b, *parts, shown=parts[1:2])
        at_once, dp = local.value, values.findings.value("dp")
        if total.unknown or (has_total and at_once and dp and total.value > at_once * dp):
            why = "the pipeline is filled anew in each step of gradient accumulation"
            values.miss(total, total.unknown or why, "num_microbatches")

    def _pipeline(self) -> None:
        values, pp = self.values, self._pp.value
        schedule = values.word("1F1B", *_everywhere("pipeline_parallel_schedule"))
        table = values.word("", *_everywhere("pipeline_parallel_schedule_csv"))
        modules = values.find(("parallelism.module_fqns_per_model_part",))
        points = values.names((), *_everywhere("pipeline_parallel_split_points"))
        per_stage = values.whole(None, *_everywhere("pipeline_parallel_layers_per_stage"))
        less = 0 if self._is_before_parallelism else 1
        ends = [
            values.whole(less, f"parallelism.pipeline_parallel_{end}_stage_less_layers", least=0)
            for end in ("first", "last")
        ]
        of = (self._pp, schedule, table, modules, points[0], per_stage, *ends)
        if pp == 1:
            return
        if unknown := next((each for each in of if each.unknown), None):
            values.miss(unknown, unknown.unknown, "schedule", "vpp", "pipeline_split")
            return
        word = str(schedule.value).lower().replace("_", "")
        if table.value or word not in (*_SINGLE, "interleaved1f1b"):
            shown = table if table.value else schedule
            why = "such a schedule has no counterpart here"
            values.miss(shown, why, "schedule", "vpp", "pipeline_split")
            return
        values.put("schedule", lambda _: _SINGLE.get(word, "1f1b"), schedule)
        stated = [each for each in of[3:] if each.said]
        num_layers = values.findings.value(f"{MODEL}num_layers")
        if num_layers is None:
            values.miss(
                stated, "the stages follow from the model, which is open", "vpp", "pipeline_split"
            )
            return
        is_single = _SINGLE.get(word) not in (None, *V_SLOTS)
        stages = stage_layers(
            num_layers,
            pp * (1 if is_single else 2),
            modules.value,
            points[1],
            per_stage.value,
            *(each.value for each in ends),
        )
        if stages is None or len(stages) % pp or (len(stages) == pp) is not is_single:
            said = ", ".join(each.said for each in stated) or f"{num_layers} layers"
            values.refuse(
                f"{said}: that is not {'one' if is_single else 'several'} for each of {pp}"
            )
        values.put("vpp", lambda *_: len(stages) // pp, schedule, shown=stated)
        is_listed = modules.said or points[0].said
        counted = (False, False) if is_listed else tuple(each.value > 0 for each in ends)
        split = split_of(stages, pp, len(stages) // pp, likely=split_of_ends(*counted))
        if split is None and all(each > 0 for each in stages[1:-1]) and sum(stages) == num_layers:
            written = layout_text(stages)
            values.put("pipeline_layout", lambda _: written, schedule, shown=stated)
        elif split is None:
            why = f"its stages have {listed([str(each) for each in stages], 16)} layers"
            values.miss(stated, f"{why}, which no stages here have", "pipeline_split")
        else:
            values.put("pipeline_split", lambda _: split, schedule, shown=stated)

    def _experts(self) -> None:
        values = self.values
        ep = values.whole(1, "parallelism.expert_parallel_degree")
        etp = values.whole(1, "parallelism.expert_tensor_parallel_degree")
        backend = values.word("standard", "parallelism.expert_parallel_comm_backend")
        found = values.findings
        if found.value(f"{MODEL}family") and not found.value(f"{MODEL}num_experts"):
            for each in (ep, etp):
                if each.said and each.value != 1:
                    values.miss(each, "it has no effect: the model has no experts")
            return
        values.put("ep", int, ep)
        if ep.value == 1:
            why = "torchtitan shares experts over tp where there is no ep"
            values.put("etp", int, self._tp, shown=(), why=why)
        else:
            values.put("etp", lambda degree, _: degree, etp, ep, shown=[etp])
        if backend.said and backend.value != "standard":
            values.miss(backend, backend.unknown or "the exchange of tokens has no knob here")

    def _recompute(self) -> None:
        values = self.values
        mode = values.word("selective", "activation_checkpoint.mode")
        option = values.word("2", "activation_checkpoint.selective_ac_option")
        budget = values.find(("activation_checkpoint.memory_budget",), 0.5)
        modes = {"full": "full", "none": "none", "memory_budget": "none"}
        every = str(option.value)
        if every in ("0", "1", BY_OPERATOR):
            modes["selective"] = "selective" if every == BY_OPERATOR else "full"
        if mode.unknown or mode.value in modes:
            of = (option,) if mode.value == "selective" else ()
            values.choice("recompute", mode, modes, beside=of)
        else:
            why = f"checkpointing of one layer in {every} is no value of recompute here"
            values.miss((mode, option), why, "recompute")
        if mode.value == "memory_budget":
            share = budget.value if isinstance(budget.value, (int, float)) else -1
            kept = round(100 * share)
            if budget.unknown or (abs(100 * share - kept) < 1e-9 and 10 <= kept < 100):
                values.put(f"{JOB}memory_budget", lambda _: kept, budget)
            elif kept != 100:
                why = "the knob has whole per cents from 10 to 100"
                values.miss(budget, why, f"{JOB}memory_budget")

    def _precision(self) -> None:
        values = self.values
        dtype = values.word("float32", "training.dtype")
        compute = values.word("bfloat16", "training.mixed_precision_param")
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        bits, left_open = self._eight_bit()
        # Without FSDP types are mixed since June 2025, on one rank and with DDP.
        is_mixed = self._is_fsdp or (not self.is_old and self._tp.value == self._pp.value == 1)
        base = names.get(str(compute.value)) if is_mixed else "fp32"
        if dtype.value not in (None, "float32"):
            why = "weights and optimizer states of that type have no counterpart here"
            values.miss(dtype, why, "precision")
        elif left_open or (bits.said and base != "bf16"):
            values.miss(bits, left_open or "fp8 here is beside bf16", "precision")
        elif base is None and not compute.unknown:
            values.miss(compute, "it is no type of torchtitan", "precision")
        else:
            why = (
                "" if is_mixed else "torchtitan mixes types with FSDP, and since 0.2 with DDP alone"
            )
            of = (dtype, compute, *(() if self._is_fsdp else (*self._sharding, self._tp, self._pp)))
            shown = [bits] if bits.said else [compute] if is_mixed else []
            mx = "mx" in str(bits.said)
            found = ("mxfp8" if mx else "fp8") if bits.said else base
            values.put("precision", lambda *_: found, *of, shown=shown, why=why)

    def _eight_bit(self) -> tuple[Stated, str]:
        """What sets products in 8 bits, where something does, and why it is not fp8 here."""
        values = self.values
        found, names = values.names((), "model.converters")
        filters, filtered = values.names((), *(f"{name}.filter_fqns" for name in _EIGHT_BIT))
        old = values.switch(*_OLD_FLOAT8)
        early = values.word("", "training.fp8_linear")
        if unknown := next((each for each in (found, filters, old, early) if each.unknown), None):
            return unknown, unknown.unknown
        if not names and (old.value or early.value):
            found, names = (old if old.value else early), [FLOAT8]
        if not names:
            return default_of(None), ""
        linear = [name for name in names if name in _EIGHT_BIT]
        if not linear:
            return found, "of these converters there is no counterpart here"
        if values.findings.value(f"{MODEL}num_experts") and len(linear) == len(names):
            return found, "the experts stay in bf16, and fp8 here includes them"
        kept = [each for each in filtered if each not in _LEFT_OUT]
        return found, f"{listed(kept, 4)} stay in bf16, and fp8 here includes them" if kept else ""

    def _settings(self) -> None:
        """The job knobs `compile` and `async_tp`."""
        values = self.values
        enabled = values.switch("compile.enable", "training.compile")
        components, parts = values.names(("model", "loss"), "compile.components")
        overlap = values.switch(*_everywhere("enable_async_tensor_parallel"))
        if enabled.value is True and components.said and {*parts} != {"model", "loss"}:
            what = "the loss is not compiled" if "model" in parts else "no block is compiled"
            values.miss(components, f"{what}, which no knob here says")
        is_on = enabled.value is True and "model" in parts
        stated = {
            "compile.enable": Stated(
                value=is_on,
                said=enabled.said,
                place=enabled.place,
                unknown=enabled.unknown or (components.unknown if enabled.value else ""),
            ),
            "parallelism.enable_async_tensor_parallel": overlap,
        }
        note_settings(
            values.findings,
            [each for each in TORCHTITAN_0_2_KNOBS if each.knob.name in ("compile", "async_tp")],
            {key: each for key, each in stated.items() if each.said},
            TrainerDefaults(of_trainer=dict.fromkeys(stated, False)),
            trainer="torchtitan",
        )

    def _others(self) -> None:
        """What else is stated, and has no counterpart here or is not known."""
        values = self.values
        values.check_optimizer("optimizer.name")
        for key, why, *names in (
            (
                "training.enable_cpu_offload",
                "weights too are offloaded, which no knob says",
                "zero_stage",
            ),
            ("fault_tolerance.enable", "replicas that come and go have no counterpart", "dp"),
            ("optimizer.early_step_in_backward", "no knob says it"),
            ("parallelism.disable_loss_parallel", "no knob says it"),
            ("training.disable_loss_parallel", "no knob says it"),
        ):
            found = values.switch(key)
            if found.said and found.value is True:
                values.miss(found, why, *names)
        for key, each in values.rest():
            if key in _IGNORED_KEYS or key.startswith(_IGNORED):
                continue
            sets_ranks = key.endswith("_degree") and each.value not in (1, -1)
            sets_types = re.search(r"fp8|float8|dtype|precision", key) and each.value is not False
            field = "precision" if sets_types else "dp" if sets_ranks else ""
            values.miss(
                each, "it is not known", f"{MODEL}name" if key.startswith("model.") else field
            )


def _everywhere(key: str) -> Iterator[str]:
    return (f"{section}.{key}" for section in _PLACES)
