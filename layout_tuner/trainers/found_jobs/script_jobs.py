"""The jobs of a launch script: each command that starts a program, read by its trainer's reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Final

from layout_tuner.documents.reading import word_of
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs import nanotron, torchtitan
from layout_tuner.trainers.found_jobs.found_job import (
    FoundJob,
    JobFileInvalidError,
    NotUnderstood,
    ReadValue,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.megatron import megatron_jobs
from layout_tuner.trainers.found_jobs.own_scripts import script_command
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.recipes import bridge_command, primus
from layout_tuner.trainers.found_jobs.scripts.shell_script import StartedProgram, started_programs

CommandReader = Callable[[ProgramCommand, JobFile], FoundJob | None]
"""Reads the options of a program; None: it is another program.

Ranks, the command itself, its name in the script, and what of the script is not understood are
added by `read_script`; of a field that a reader has found, its own value stays. Files that the
program reads are found by `JobFile.beside`, also those that the script writes.
"""

COMMAND_READERS: Final[Sequence[CommandReader]] = (
    primus.read_command,
    bridge_command.read_command,
    torchtitan.read_command,
    nanotron.read_command,
    megatron_jobs.read_command,
    script_command.read_command,  # any script's
)
"""In the order in which they are tried."""

_ANY_OPTIONS: Final = re.compile(
    r"\$\{?(?:\w*(?:ARG|OPT|FLAG|PARAM|EXTRA)\w*|\w+\[[@*]\])\}?|\$\(.*\s--\w.*", re.IGNORECASE
)
"""Variables that hold options, by their names: of an unknown one no reader can say which."""

_FROM_OUTSIDE: Final = "is not set in the script"
"""The reason of a variable that nothing sets: it is taken as empty, and listed."""

_OTHER_SUFFIXES: Final = (".py", ".json", ".toml", ".yaml", ".yml")
_SCRIPT_SUFFIXES: Final = (".sh", ".bash", ".sbatch", ".slurm", ".pbs", ".lsf", ".job")


def read_script(
    file: JobFile, readers: Sequence[CommandReader] = COMMAND_READERS
) -> list[FoundJob] | None:
    """The jobs that a script starts, or those of plain command lines in a text.

    None: the file is no script.

    Raises:
        JobFileInvalidError: it is a script, and starts nothing that a reader knows.
    """
    suffix = PurePath(file.name).suffix.lower()
    if suffix in _OTHER_SUFFIXES:
        return None
    first_line = file.text.partition("\n")[0]
    is_script = suffix in _SCRIPT_SUFFIXES or (first_line.startswith("#!") and "sh" in first_line)
    try:
        started = started_programs(file)
    except JobFileInvalidError:
        if is_script:
            raise
        return None
    jobs: list[FoundJob] = []
    for each in started:
        job = _job(each, file, readers)
        if job is not None and not any(_is_same(job, other) for other in jobs):
            jobs.append(job)
    if not jobs and is_script:
        raise JobFileInvalidError(_no_job(file, started))
    if len(jobs) > 1:
        jobs = [replace(job, name=str(number)) for number, job in enumerate(jobs, 1)]
    return jobs or None


def commands_of(
    file: JobFile, job: FoundJob, readers: Sequence[CommandReader] = COMMAND_READERS
) -> list[ProgramCommand]:
    """The commands of a script that start a job which was read of it; several branches may."""
    found = ((_job(each, file, readers), each.command) for each in started_programs(file))
    return [command for each, command in found if each is not None and _is_same(each, job)]


def _job(
    started: StartedProgram, file: JobFile, readers: Sequence[CommandReader]
) -> FoundJob | None:
    command = started.command
    beside = replace(file, written=started.written)
    for reader in readers:
        job = reader(command, beside)
        if job is not None:
            found = _with_command(job, command)
            launch = found.command or command.launch
            return replace(found, command=replace(launch, written=started.written))
    return None


def _with_command(job: FoundJob, command: ProgramCommand) -> FoundJob:
    """The job with what its script says, beside its program's options."""
    fields = {each.field for each in job.read} | set(job.open_fields)
    ranks = [each for each in command.ranks if each.field not in fields]
    known = fields | {each.field for each in ranks}
    missed = [
        replace(each, field="") if each.field in known else each
        for each in command.not_understood
        if each not in job.not_understood
    ]
    unknown = [
        word for word in command.words if word.text is None and _ANY_OPTIONS.fullmatch(word.said)
    ]
    said = {each.said for each in job.not_understood}
    missed += [
        NotUnderstood(said=each.said, why=each.why, line=each.line)
        for each in unknown
        if each.said not in said
    ]
    if any(each.said.startswith(("source ", ". ")) for each in command.not_understood):
        doubtful = unknown
    else:
        doubtful = [each for each in unknown if not each.why.endswith(_FROM_OUTSIDE)]
    if doubtful:
        missed += _open_defaults(job, doubtful[0])
        job = replace(job, assumed=())
    read = {each.field for each in ranks}
    return replace(
        job,
        read=tuple(_with_default(each, command) for each in (*job.read, *ranks)),
        assumed=tuple(each for each in job.assumed if each.field not in read),
        not_understood=(*job.not_understood, *missed),
        command=job.command or command.launch,
    )


def _with_default(value: ReadValue, command: ProgramCommand) -> ReadValue:
    """A value that may be the default of a variable, by its place."""
    launcher = (word for option in command.launcher_options for word in option.values)
    for word in (*command.words, *launcher):
        if word.default_of and word.place and value.place and word.place.end == value.place.end:
            return replace(value, default_of=word.default_of)
    return value


def _open_defaults(job: FoundJob, word: Word) -> list[NotUnderstood]:
    """Defaults of the trainer, of which options that are not known may change each."""
    return [
        NotUnderstood(
            said=word.said,
            why=f"{word.why}; without it {each.field} is {word_of(each.value)}: {each.why}",
            field=each.field,
            line=word.line,
        )
        for each in job.assumed
    ]


def _is_same(job: FoundJob, other: FoundJob) -> bool:
    """Whether two commands are one job: a script may start it in several branches."""
    notes, others = (
        [(note.said, note.why, note.field) for note in each.not_understood] for each in (job, other)
    )
    return job.values == other.values and notes == others


def _no_job(file: JobFile, started: Sequence[StartedProgram]) -> str:
    programs = [each.command.words[0].said for each in started]
    words = (word for each in started for word in each.command.words)
    quoted = next((each for each in words if re.match(r"--\S.*\s--", each.said, re.DOTALL)), None)
    if quoted is not None:
        return (
            f"{file.name} gives {programs[0]} all options as one word in line {quoted.line}: their "
            "variable stands in quotes; take the quotes away"
        )
    found = f"starts {listed(dict.fromkeys(programs), 3)}" if programs else "starts no training"
    return (
        f"{file.name} {found}, and no trainer that is known reads such a command; known are "
        "programs with the options of Megatron-LM, Megatron-DeepSpeed, DeepSpeed and Accelerate"
    )
