"""Command lines of Megatron-Bridge: a recipe, options, and overrides such as `model.x=4`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from layout_tuner.trainers.found_jobs.found_job import (
    MODEL,
    FoundJob,
    NotUnderstood,
    ReadValue,
    Stated,
    TextPlace,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned import positioned
from layout_tuner.trainers.found_jobs.program_command import (
    CONDITIONAL,
    ProgramCommand,
    Word,
    options_of,
)
from layout_tuner.trainers.found_jobs.recipes.bridge import (
    OTHER_SECTIONS,
    SECTIONS,
    bridge_job,
    settings_of,
)

_PROGRAMS: Final = re.compile(
    r"(?:.*/)?scripts/(training|performance)/(run_recipe|run_script|bootstrap|setup_experiment)\.py"
    r"|(?:.*/)?(run_recipe|run_script|setup_experiment)\.py|(?:.*/)?scripts/training/train\.sh"
)
_OVERRIDE: Final = re.compile(r"(\+\+?|~)?([A-Za-z_]\w*(?:\.\w+)+|mixed_precision)(?:=(.*))?", re.S)

_KEYS: Final = {
    option: key
    for key, options in {
        "model.tensor_model_parallel_size": "-tp",
        "model.pipeline_model_parallel_size": "-pp",
        "model.context_parallel_size": "-cp",
        "model.virtual_pipeline_model_parallel_size": "-vp",
        "model.expert_model_parallel_size": "-ep",
        "model.expert_tensor_parallel_size": "-etp -et",
        "train.micro_batch_size": "-mb",
        "train.global_batch_size": "-gb",
        "dataset.seq_length": "-sl",
        "model.recompute_num_layers": "-rl",
        **dict.fromkeys(("model.hidden_size", "model.num_layers", "model.num_moe_experts"), ""),
        **dict.fromkeys(("model.pipeline_model_parallel_layout", "ddp.use_megatron_fsdp"), ""),
        **dict.fromkeys(("model.cuda_graph_impl", "model.recompute_modules"), ""),
        "model.cuda_graph_modules": "--cuda_graph_scope",
        "model.overlap_moe_expert_parallel_comm": "--moe_a2a_overlap",
        "model.cpu_offloading": "-ol --activation_offload_layers",
        "optimizer.optimizer": "--optimizer_type",
    }.items()
    for option in (*options.split(), *(() if "--" in options else (f"--{key.partition('.')[2]}",)))
}
"""Settings by the options of both programs that override them; most have the setting's name."""
_IMPLIED: Final = {
    "--use_megatron_fsdp": {"ddp.data_parallel_sharding_strategy": "optim_grads_params"},
    "-rl": {"model.recompute_granularity": "full", "model.recompute_method": "block"},
    "--recompute_modules": {"model.recompute_granularity": "selective"},
}
"""What an option sets besides (`scripts/performance/utils/overrides.py`)."""
_IMPLIED["--recompute_num_layers"] = _IMPLIED["-rl"]
_SELECTING: Final = {
    **dict.fromkeys(("--recipe", "--recipe_name"), "recipe"),
    **dict.fromkeys(("--model", "-mr", "--model_recipe_name"), "model"),
    **dict.fromkeys(("--mode", "--task"), "task"),
    **dict.fromkeys(("-ng", "--num_gpus"), "devices"),
    **dict.fromkeys(("-gn", "--gpus_per_node"), "devices_per_node"),
    **dict.fromkeys(("-g", "--gpu"), "chip"),
    **dict.fromkeys(("-c", "--compute_dtype"), "precision"),
    **dict.fromkeys(("--config-file", "--config_file"), "file"),
}
_SWITCHES: Final = ("--dry-run", "--dryrun", "-d", "--deterministic", "--offline", "--use_recipes")
_OF_TASKS: Final = {"lora": "peft", "dora": "peft"}
_MATTERS: Final = re.compile(
    r"--\w*(parallel|batch|recompute|layers|expert|dispatch|offload|fp8|drop|dense|optimizer|variant|"
    r"nccl_ub)\w*|-[a-z]+"
)
"""Options that are listed where they are not known, also all short ones; other long ones are of
logs, data and machines."""


def read_command(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """The job of a program that runs a recipe of Megatron-Bridge; None: another program."""
    words = command.words[1:]
    if not _PROGRAMS.fullmatch(command.program) and not _has_overrides(command):
        return None
    stated: dict[str, Stated] = {}
    chosen: dict[str, Word] = {}
    missed: list[NotUnderstood] = []
    for option, word in _options(words):
        if word is None:
            if option and _MATTERS.fullmatch(option):
                missed.append(NotUnderstood(said=option, why="it is not known here"))
        elif option in _SELECTING:
            chosen[_SELECTING[option]] = word
        elif option in _KEYS:
            stated[_KEYS[option]] = _stated(word, f"{option} {word.said}", word.text, file)
            for path, value in _IMPLIED.get(option, {}).items():
                stated[path] = Stated(value=value, said=option, line=word.line)
        elif _MATTERS.fullmatch(option):
            field = f"{MODEL}num_dense_layers" if "dense" in option else ""
            # The value of a short option may be a secret, such as a token.
            said = f"{option} {word.said}" if option.startswith("--") or option == "-cv" else option
            missed.append(NotUnderstood(said=said, why="it is not known here", field=field))
    stated = {**_of_file(chosen.get("file"), file, missed), **stated}
    for word in words:
        _override(word, file, stated, missed)
    job = bridge_job(file, stated, recipe=_recipe(chosen))
    job = _with_devices(job, chosen)
    return replace(job, not_understood=(*job.not_understood, *missed))


def _has_overrides(command: ProgramCommand) -> bool:
    """Whether a program of the user's gets a recipe or overrides of Megatron-Bridge."""
    texts = [each.text or "" for each in command.words[1:]]
    recipe = texts[texts.index("--recipe") + 1 :] if "--recipe" in texts else []
    if recipe and recipe[0].endswith("_config"):
        return True
    sections = (*SECTIONS, "dataset", "optimizer", "checkpoint", "logger")
    found = [_OVERRIDE.fullmatch(each.text or each.prefix) for each in command.words[1:]]
    names = [each[2] for each in found if each and each[3] is not None]
    return command.program.endswith(".py") and any(
        name.startswith(("model.", "train.")) and name.partition(".")[0] in sections
        for name in names
    )


def _options(words: Sequence[Word]) -> Iterator[tuple[str, Word | None]]:
    """Options with their values; None: a switch."""
    for option in options_of(words, r"-(?!\d+$)."):
        word = next(iter(option.values), None)
        text = "" if word is None else word.prefix if word.text is None else word.text
        is_override = "=" in text and "=" not in option.word.said and _OVERRIDE.fullmatch(text)
        yield option.name, None if option.name in _SWITCHES or is_override else word


def _stated(word: Word, said: str, text: str | None, file: JobFile) -> Stated:
    """The value of a word, or of the part of it behind `=`."""
    unknown = "" if word.is_certain else CONDITIONAL
    if text is None:
        return Stated(value=None, said=said, line=word.line, unknown=word.why or "it is not known")
    place = word.place
    if place is not None and len(text) <= place.end - place.start:
        place = TextPlace(line=place.line, start=place.end - len(text), end=place.end)
        place = place if file.text[place.start : place.end] == text else None
    return Stated(value=_plain(text), said=said, place=place, line=word.line, unknown=unknown)


def _plain(text: str) -> Any:
    """A value as Hydra reads it: null, switches, numbers, lists; other text as it is."""
    if text in ("None", "null", ""):
        return None
    if re.fullmatch(r"[\w,]+", text) and "," in text:
        return text.split(",")  # of options such as --recompute_modules
    if re.fullmatch(r"[\w.+-]+|\[.*\]|'[^']*'|\"[^\"]*\"", text):
        return positioned(JobFile(name="override.yaml", text=text)).value
    return text


def _override(
    word: Word, file: JobFile, stated: dict[str, Stated], missed: list[NotUnderstood]
) -> None:
    """Applies a word such as `model.x=4`, `++model.x=4` or `~model.x`."""
    text = word.prefix if word.text is None else word.text
    found = _OVERRIDE.fullmatch(text)
    if found is None:
        if word.text is None and not text.startswith("-"):
            why = f"it may be overrides: {word.why}" if word.why else "it may be overrides"
            missed.append(NotUnderstood(said=word.said, why=why, line=word.line))
        return
    sign, path, value = found.groups()
    if path.partition(".")[0] not in (*SECTIONS, *OTHER_SECTIONS):
        return
    if sign == "~":
        stated.pop(path, None)
    elif value is not None:
        stated[path] = _stated(word, word.said, None if word.text is None else value, file)


def _of_file(word: Word | None, file: JobFile, missed: list[NotUnderstood]) -> dict[str, Stated]:
    """The overrides of the file that an option names; places in it are not those of this file."""
    if word is None:
        return {}
    other = file.beside(word.text or "")
    if other is None:
        why = "this file does not lie beside the script"
        missed.append(NotUnderstood(said=word.said, why=why, line=word.line))
        return {}
    return {
        path: Stated(value=each.value, said=f"{other.name}: {each.said}", unknown=each.unknown)
        for path, each in settings_of(positioned(other)).items()
    }


def _recipe(chosen: dict[str, Word]) -> str:
    """The name of the recipe that options select; empty: they do not say it."""
    text = {name: word.text or "" for name, word in chosen.items() if word.is_certain}
    if recipe := text.get("recipe"):
        return recipe
    if not text.get("model"):
        return ""
    task = _OF_TASKS.get(text.get("task", ""), text.get("task") or "pretrain")
    if text.get("chip") and text.get("devices"):
        precision = (text.get("precision") or "bf16").replace("_", "")
        return (
            f"{text['model']}_{task}_{text['devices']}gpu_{text['chip']}_{precision}_config".lower()
        )
    return f"{text['model']}_{task}_config".lower()


def _with_devices(job: FoundJob, chosen: dict[str, Word]) -> FoundJob:
    """The job with the devices that options state."""
    found = []
    for name, ours in (("devices", "num_devices"), ("devices_per_node", "devices_per_node")):
        word = chosen.get(name)
        if word is not None and word.text and word.text.isdecimal():
            said = f"--num_gpus {word.said}" if name == "devices" else word.said
            found.append(ReadValue(field=ours, value=int(word.text), said=said, place=word.place))
    names = {each.field for each in found}
    assumed = tuple(each for each in job.assumed if each.field not in names)
    return replace(job, read=(*job.read, *found), assumed=assumed)
