"""Jobs of Megatron-LM and Megatron-DeepSpeed, from the options of their program.

The reader is the inverse of the adapters `trainers.megatron_lm` and `trainers.megatron_deepspeed`,
whose options it takes. Where an option is absent the trainer's own default counts: those of
megatron/training/arguments.py and megatron/core's configurations at d98e8a64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODULES, read_recompute
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.found_jobs.found_job import JOB, MODEL, Findings, FoundJob
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import (
    TrainerDefaults,
    note_settings,
    settings_in_effect,
)
from layout_tuner.trainers.found_jobs.megatron.megatron_flags import note_others
from layout_tuner.trainers.found_jobs.megatron.megatron_model import read_model
from layout_tuner.trainers.found_jobs.megatron.megatron_options import (
    Arguments,
    named,
    options_of_mapping,
)
from layout_tuner.trainers.found_jobs.megatron.megatron_pipeline import read_pipeline
from layout_tuner.trainers.found_jobs.megatron.megatron_with_deepspeed import (
    DEEPSPEED_OPTIONS,
    read_engine,
)
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES, root_of
from layout_tuner.trainers.found_jobs.program_command import Option, ProgramCommand, options_of
from layout_tuner.trainers.megatron_lm import (
    LAYOUT_FLAGS,
    MEGATRON_LM,
    MODEL_FLAGS,
    MODULE_NAMES,
    MODULES_FLAG,
    OPTIMIZER_OFFLOAD_FLAG,
    PIPELINE_FIRST_FLAG,
    SHARDING_STRATEGIES,
)

Trainer = Literal["megatron-lm", "megatron-deepspeed"]

_TITLES: Final[Mapping[Trainer, str]] = {
    "megatron-lm": "Megatron-LM",
    "megatron-deepspeed": "Megatron-DeepSpeed",
}
_TELLING: Final = frozenset(
    (
        *(LAYOUT_FLAGS[name] for name in ("tp", "pp", "micro_batch_size", "global_batch_size")),
        *(flag for name, flag in MODEL_FLAGS.items() if name != "num_layers"),
        "--num-layers",
        "--model-parallel-size",
    )
)
"""Options of which a program of the family has at least two."""
_NO_TRAINING: Final = (
    "server",
    "generat",
    "convert",
    "preprocess",
    "inference",
    "checkpoint",
    "eval",
)
"""Parts of the names of programs that take such options and train nothing."""
_MODEL_ARGUMENTS: Final = "MODEL_ARGS"
"""The section of a YAML file of Megatron-LM's tests and of its zoo of mixtures of experts, whose
keys are options."""

_DISPATCHER: Final = "--moe-token-dispatcher-type"
_KNOB_DEFAULTS: Final = TrainerDefaults(
    of_trainer={
        _DISPATCHER: ("allgather",),
        "--moe-flex-dispatcher-backend": ("deepep",),
        "--cuda-graph-impl": ("none",),
        "--cross-entropy-fusion-impl": ("native",),
        "--exp-avg-dtype": ("fp32",),
        "--exp-avg-sq-dtype": ("fp32",),
    },
    of_knobs={
        _DISPATCHER: ("alltoall",),
        "--overlap-grad-reduce": (),
        "--overlap-param-gather": (),
        "--moe-grouped-gemm": (),
    },
    ignored=("--no-check-for-nan-in-loss-and-grad", "--use-precision-aware-optimizer"),
)
"""The defaults of transformer_config.py, model_parallel_config.py and optimizer_config.py, and what
the exports write. The ignored ones go with CUDA graphs, and with types of moments."""

_FIELDS_OF_YAML: Final = (
    *("tp", "pp", "cp", "vpp", "micro_batch_size", "global_batch_size", "zero_stage"),
    *("recompute", "precision", "model.num_layers"),
)
"""What is open where the values of the options stand in a file that is not read."""


def read_command(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """The job of a command; None: its program is of another family."""
    options = [*options_of(command.words[1:])]
    program = command.program.rpartition("/")[2]
    names = {named(each.name) for each in options}
    if len(names & _TELLING) < 2 or any(each in program for each in _NO_TRAINING):
        return None
    engine = command.launcher == "deepspeed" or not names.isdisjoint(DEEPSPEED_OPTIONS)
    trainer: Trainer = "megatron-deepspeed" if engine else "megatron-lm"
    findings = read_options(
        options, trainer, file=file, program=program, environment=command.environment
    )
    return findings.job(file=file.name, format=trainer, trainer=trainer)


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The jobs of a YAML file that has options as keys below MODEL_ARGS; None: it has none."""
    root = root_of(file, *YAML_SUFFIXES)
    if root is None:
        return None
    sections = {
        name: each
        for name, each in (root.entries or {}).items()
        if name.startswith(_MODEL_ARGUMENTS) and each.is_mapping
    }
    if not any(key.startswith("--") for each in sections.values() for key in each.keys()):  # noqa: SIM118
        return None
    variables = root.get("ENV_VARS")
    environment = (
        {key: str(each.value) for key, each in (variables.entries or {}).items()}
        if variables
        else {}
    )
    found = []
    for name, section in sections.items():
        options = options_of_mapping(section)
        findings = read_options(options, "megatron-lm", file=file, environment=environment)
        job = findings.job(file=file.name, format="megatron-lm", trainer="megatron-lm")
        number = name.removeprefix(_MODEL_ARGUMENTS).strip("_")
        found.append(replace(job, name=number or ("1" if len(sections) > 1 else "")))
    return found


def read_options(
    options: Iterable[Option],
    trainer: Trainer,
    *,
    file: JobFile,
    program: str = "",
    environment: Mapping[str, str] | None = None,
) -> Findings:
    """What options of the family say, with the trainer's defaults where they say nothing.

    Args:
        options: in the order in which the program reads them; `options_of_mapping` makes them of
            keys of a configuration.
        trainer: whose program it is.
        file: where files that are named may lie.
        program: the file name of the program; empty: it trains decoders.
        environment: variables that the script exports.
    """
    arguments = Arguments(
        trainer=_TITLES[trainer],
        findings=Findings(),
        environment=environment or {},
        program=program,
    )
    arguments.take(options)
    _read_mesh(arguments)
    read_model(arguments)
    if trainer == "megatron-deepspeed":
        _read_recompute(arguments)
        _read_precision(arguments)
        _read_batch(arguments)
        read_engine(arguments, file)
        known = set[str]()
    else:
        read_pipeline(arguments)
        _read_zero(arguments)
        _read_recompute(arguments)
        _read_levers(arguments)
        _read_precision(arguments)
        _read_batch(arguments)
        known = _read_knobs(arguments)
    if (option := arguments.switch("", "--yaml-cfg")) is not None:
        for name in _FIELDS_OF_YAML:
            arguments.miss(option, "the file has the values of all options, and is not read", name)
    note_others(arguments, known)
    return arguments.findings


def _read_mesh(arguments: Arguments) -> None:
    """Degrees, the exchange of cp, sequence parallelism, experts, and the order of ranks."""
    former = {"tp": "--model-parallel-size"}
    for name in ("tp", "pp", "cp"):
        arguments.whole(name, *filter(None, (former.get(name), LAYOUT_FLAGS[name])))
        arguments.assume(name, 1, LAYOUT_FLAGS[name])
    for flag in ("--tensor-parallel-num-weight-shards", "--hybrid-context-parallel"):
        if (option := arguments.switch("", flag)) is not None:
            name = "cp" if "context" in flag else "dp"
            arguments.miss(option, "it changes what the ranks of a replica are", name)
    _read_exchange(arguments)
    parallel = arguments.switch("sequence_parallel", LAYOUT_FLAGS["sequence_parallel"])
    if parallel is not None:
        # arguments.py, validate_args: it is turned off where tp is 1.
        arguments.note("sequence_parallel", arguments.findings.value("tp") != 1, parallel)
    arguments.assume("sequence_parallel", False, LAYOUT_FLAGS["sequence_parallel"])
    order = arguments.switch("rank_order", PIPELINE_FIRST_FLAG)
    if order is not None:
        arguments.note("rank_order", "tp_cp_pp_dp", order)
    if arguments.trainer == "Megatron-LM" and arguments.is_given("--num-experts"):
        arguments.whole("ep", LAYOUT_FLAGS["ep"])
        arguments.assume("ep", 1, LAYOUT_FLAGS["ep"])
        tp, flag = arguments.findings.value("tp"), LAYOUT_FLAGS["etp"]
        if arguments.whole("etp", flag) is None and tp is not None:
            arguments.assume("etp", tp, f"{flag}: that of tp")
        elif arguments.findings.value("etp") is None and not arguments.findings.is_open("etp"):
            arguments.findings.miss(
                f"no {flag}", "it is that of tp, which is not known", name="etp"
            )
    else:
        arguments.is_given(LAYOUT_FLAGS["ep"], LAYOUT_FLAGS["etp"])


def _read_exchange(arguments: Arguments) -> None:
    name, flag = "cp_comm_type", LAYOUT_FLAGS["cp_comm_type"]
    if arguments.findings.value("cp") == 1 or arguments.trainer != "Megatron-LM":
        arguments.is_given(flag)
        return
    words = arguments.texts(name, flag)
    if words is not None:
        kinds = {"all_gather" if each == "allgather" else each for each in words}
        option = arguments.options[flag]
        if len(kinds) == 1 and kinds <= {*CP_COMM_TYPES}:
            arguments.note(name, kinds.pop(), option, option.values[0])
        else:
            arguments.miss(option, f"it is not one of {', '.join(CP_COMM_TYPES)}", name)
    arguments.assume(name, "p2p", flag)


def _read_zero(arguments: Arguments) -> None:
    name, findings = "zero_stage", arguments.findings
    optimizer = arguments.switch(name, "--use-distributed-optimizer")
    fsdp = arguments.switch(name, "--use-megatron-fsdp", "--use-custom-fsdp")
    fsdp2 = arguments.switch(name, "--use-torch-fsdp2")
    strategy = "--data-parallel-sharding-strategy"
    if fsdp2 is not None:
        kept = arguments.switch(name, "--torch-fsdp2-no-reshard-after-forward")
        arguments.note(name, 3 if kept is None else 2, fsdp2)
    elif fsdp is not None:
        stages = {"no_shard": 0, "optim": 1} | {v: k for k, v in SHARDING_STRATEGIES.items()}
        found = arguments.word(name, strategy)
        if found is None:
            arguments.assume(name, 0, strategy)
        elif (stage := stages.get(found[1].text or "")) is None:
            arguments.miss(found[0], f"it is not one of {', '.join(stages)}", name)
        else:
            arguments.note(name, stage, *found)
    elif optimizer is not None:
        arguments.note(name, 1, optimizer)
    arguments.assume(name, 0, "--use-distributed-optimizer")
    arguments.is_given(strategy, "--ckpt-format", "--torch-fsdp2-no-reshard-after-forward")
    replicas, outer = LAYOUT_FLAGS["zero_replicas"], "--outer-dp-sharding-strategy"
    if findings.value(name) == 0:
        arguments.is_given(replicas, outer)
        return
    arguments.whole("zero_replicas", replicas)
    found = arguments.word("zero_replicas", outer)
    if found is not None and found[1].text != "no_shard":
        arguments.miss(found[0], "states that are sharded over the copies, too", "zero_replicas")
    if (found := arguments.word("", "--optimizer")) and (found[1].text or "").startswith("dist"):
        arguments.miss(found[0], "an optimizer that shards its states in its own way", name)


def _read_recompute(arguments: Arguments) -> None:
    """Recomputation: of attention's core, or of all layers, each from its own input."""
    name = "recompute"
    arguments.is_given(MODULES_FLAG, *_METHOD, *_NUM_LAYERS)
    found = arguments.word(name, "--recompute-granularity")
    selective = arguments.switch(name, "--recompute-activations")
    former = arguments.switch(name, "--checkpoint-activations", "--activations-checkpoint-method")
    if arguments.findings.is_open(name):
        return
    spread = arguments.switch(
        name, "--distribute-saved-activations", "--distribute-checkpointed-activations"
    )
    granularity = "full" if former is not None else None if found is None else found[1].text
    if selective is not None or granularity == "selective":
        modules = arguments.texts(name, MODULES_FLAG)
        ours = {theirs: each for each, theirs in MODULE_NAMES.items()}
        named_here = [ours.get(each, each) for each in modules or ("core_attn",)]
        if unknown := {*named_here} - {*RECOMPUTE_MODULES}:
            what = f"{', '.join(sorted(unknown))}: no module that recompute here names"
            arguments.miss(arguments.options[MODULES_FLAG], what, name)
        elif not arguments.findings.is_open(name):
            option = selective if found is None else found[0]
            assert option is not None, "one of both is given"
            value = read_recompute([*dict.fromkeys(named_here)])
            arguments.note(name, value, option, None if found is None else found[1])
    elif granularity == "full":
        _read_whole_layers(arguments, former or (found[0] if found else None))
        if spread is not None:
            arguments.miss(spread, "activations that are divided over tp", name)
    elif found is not None:
        arguments.miss(found[0], "it is neither full nor selective", name)
    if (option := arguments.switch(name, "--moe-layer-recompute")) is not None:
        arguments.miss(option, "recomputation of layers with experts alone", name)
    arguments.assume(name, "none", "--recompute-granularity")


_METHOD: Final = ("--recompute-method", "--activations-checkpoint-method")
_NUM_LAYERS: Final = (
    "--recompute-num-layers",
    "--activations-checkpoint-num-layers",
    "--checkpoint-num-layers",
)


def _read_whole_layers(arguments: Arguments, option: Option | None) -> None:
    """`uniform` keeps the input of each n-th layer, `block` recomputes n layers of a stage."""
    name = "recompute"
    assert option is not None, "it says that whole layers are recomputed"
    method = arguments.word(name, *_METHOD)
    number = arguments.whole(name, *_NUM_LAYERS, notes=False)
    if arguments.findings.is_open(name):
        return
    is_former = named(option.name) == "--checkpoint-activations"
    kind = "uniform" if method is None and is_former else None if method is None else method[1].text
    word = option.values[0] if option.values else None
    if kind == "uniform" and number in (None, 1):
        arguments.note(name, "full", option, word)
    elif kind == "uniform":
        why = f"groups of {number} layers, which keep one input: no recompute here says it"
        arguments.miss(option, why, name)
    elif kind == "block" and number is not None:
        value = arguments.findings.value
        layers = value("model.num_layers")
        stages = (value("pp") or 0) * (value("vpp") or 1)
        if number == 0:
            arguments.note(name, "none", option, word)
        elif layers and stages and number * stages >= layers:
            arguments.note(name, "full", option, word)
        else:
            arguments.note(name, "full", option, word)
            arguments.note("recompute_layers", str(number), option)
    else:
        why = "it needs --recompute-method, and with block --recompute-num-layers"
        arguments.miss(option, why, name)


def _read_levers(arguments: Arguments) -> None:
    """Offload of all activations or of the whole optimizer, and moments in bf16."""
    name, layers = "offload", arguments.findings.value("model.num_layers")
    number = arguments.whole(name, "--cpu-offloading-num-layers", notes=False)
    if number and (option := arguments.switch(name, "--cpu-offloading-num-layers")) is not None:
        if layers and number >= layers - 2:
            arguments.note(name, "activations", option)
        else:
            arguments.miss(option, "offload here is of all layers but two", name)
    if (option := arguments.switch(name, OPTIMIZER_OFFLOAD_FLAG)) is not None:
        arguments.note(name, "optimizer", option)
    part = arguments.word(name, "--optimizer-offload-fraction")
    if part is not None and part[1].text not in ("1", "1.0"):
        arguments.miss(part[0], "offload here is of the whole optimizer", name)
    dtypes = [arguments.word("", flag) for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")]
    first = dtypes[0]
    if first is not None and all(each is not None and each[1].text == "bf16" for each in dtypes):
        arguments.note("optimizer_states", "bf16", *first)


def _read_precision(arguments: Arguments) -> None:
    name = "precision"
    fp8 = arguments.word(name, "--fp8-format", "--fp8")
    former = arguments.switch(name, "--fp8-hybrid", "--fp8-e4m3")
    recipe = arguments.word("", "--fp8-recipe")
    if fp8 is not None or former is not None:
        option, word = fp8 if fp8 is not None else (former, None)
        assert option is not None, "one of both is given"
        arguments.note(name, "fp8", option, word)
        if recipe is None or recipe[1].text != "tensorwise":
            said = "no --fp8-recipe" if recipe is None else recipe[0].said
            arguments.findings.miss(said, "fp8 counts here as with one scale for each tensor")
    else:
        for each in ("bf16", "fp16"):
            if (option := arguments.switch(name, f"--{each}")) is not None:
                arguments.note(name, each, option)
    if (option := arguments.switch(name, "--fp4-format", "--fp4")) is not None:
        arguments.miss(option, "no precision here is of 4 bits", name)
    arguments.is_given("--bf16", "--fp16")
    arguments.assume(name, "fp32", "--bf16 and --fp16")


def _read_batch(arguments: Arguments) -> None:
    micro = ("micro_batch_size", "--batch-size", LAYOUT_FLAGS["micro_batch_size"])
    if arguments.whole(*micro) is None and not arguments.findings.is_open(micro[0]):
        why = f"{arguments.trainer} needs it, and the command does not have it"
        arguments.findings.miss(f"no {micro[2]}", why, name=micro[0])
    name, flag = "global_batch_size", LAYOUT_FLAGS["global_batch_size"]
    arguments.is_given(flag)
    if (option := arguments.switch(name, "--step-batch-size-schedule")) is not None:
        arguments.miss(option, "a batch that changes while the job runs", name)
    elif arguments.whole(name, flag) is None and not arguments.findings.is_open(name):
        arguments.assume("num_microbatches", 1, f"{flag}: one micro-batch on each replica")
    if (option := arguments.switch("", "--rampup-batch-size")) is not None:
        what = "a smaller batch at the beginning: the one after it counts here"
        arguments.miss(option, what)


def _read_knobs(arguments: Arguments) -> set[str]:
    stated = arguments.stated()
    graphs = stated.get("--cuda-graph-impl")
    if graphs is None or graphs.value == ("none",):
        for name in ("--cuda-graph-scope", "--cuda-graph-modules"):
            stated.pop(name, None)
    kind = stated.get(_DISPATCHER)
    if kind is not None and kind.value == ("alltoall_seq",):  # a former form of it
        stated[_DISPATCHER] = replace(kind, value=("alltoall",))
    known = note_settings(
        arguments.findings,
        MEGATRON_LM.knobs,
        stated,
        _KNOB_DEFAULTS,
        trainer=arguments.trainer,
    )
    for name in ("--enable-cuda-graph", "--external-cuda-graph"):
        if (option := arguments.switch("job.cuda_graphs", name)) is not None:
            arguments.miss(option, "no cuda_graphs here says it", "job.cuda_graphs")
    _leave_out_without_effect(arguments.findings)
    return known


def _leave_out_without_effect(findings: Findings) -> None:
    """Drops settings that no option states and that change nothing in this layout.

    Replicas are not known yet: there may be many.
    """
    assumed = [name for name in findings.assumed if name.startswith(JOB)]
    values: dict[str, Any] = {
        name: findings.value(name) for name in (*findings.read, *findings.assumed)
    }
    shape = {name.removeprefix(MODEL): values[name] for name in values if name.startswith(MODEL)}
    knobs = {name: values[name] for name in LAYOUT_FIELDS if values.get(name) is not None}
    settings = {name.removeprefix(JOB): values[name] for name in values if name.startswith(JOB)}
    try:
        model = ModelShape.from_mapping({"vocab_size": 1 << 15, **shape})
        layout = Layout(**{**knobs, "dp": 1 << 12})
    except SearchSpaceError:
        return
    kept = settings_in_effect(settings, MEGATRON_LM.knobs, layout, model)
    for name in assumed:
        if name.removeprefix(JOB) not in kept:
            del findings.assumed[name]
