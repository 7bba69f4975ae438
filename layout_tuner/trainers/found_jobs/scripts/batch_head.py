"""What the head of a batch script asks for: Slurm's `#SBATCH`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Literal

from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import Word
from layout_tuner.trainers.found_jobs.scripts.shell_values import TextPiece, Value, unknown

Size = Literal["nodes", "tasks_per_node", "tasks", "gpus_per_node", "gpus"]
"""What a batch system or a launcher starts, by the words of Slurm: a task is a process."""

_SIZES: Final[Mapping[Size, tuple[str, str]]] = {
    "nodes": ("--nodes -N", "NNODES JOB_NUM_NODES"),
    "tasks_per_node": ("--ntasks-per-node --tasks-per-node", "NTASKS_PER_NODE"),
    "tasks": ("--ntasks -n", "NTASKS NPROCS"),
    "gpus_per_node": ("--gpus-per-node --gres", "GPUS_PER_NODE GPUS_ON_NODE"),
    "gpus": ("--gpus -G", "GPUS"),
}
SLURM_OPTIONS: Final = {name: size for size, (of, _) in _SIZES.items() for name in of.split()}
"""Options of sbatch and srun, of Slurm's manual pages."""
SLURM_VARIABLES: Final = {
    f"SLURM_{name}": size for size, (_, of) in _SIZES.items() for name in of.split()
}
"""Variables that a batch script gets (output environment variables of sbatch)."""

_ALWAYS_SET: Final = (
    *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_SUBMIT_DIR"),
)

_PLAIN: Final = re.compile(r"(\d+)")
_NODES: Final = re.compile(r"(\d+)(?:-\1)?")
_GPUS: Final = re.compile(r"(?:[\w.-]+:)?(\d+)")
_GRES: Final = re.compile(r"(?:.*,)?(?:gres[:/])?gpu(?::[A-Za-z][\w.-]*)?:(\d+)(?:[,(].*)?")


def slurm_sizes(options: Iterable[tuple[str, Word]]) -> dict[Size, Word]:
    """The sizes among options of sbatch or srun; a text is a number, or not known."""
    found: dict[Size, Word] = {}
    for name, word in options:
        size = SLURM_OPTIONS.get(name)
        if size is None or (name == "--gres" and "gpu" not in (word.text or "")):
            continue
        pattern = _GRES if name == "--gres" else _NODES if size == "nodes" else _PLAIN
        pattern = _GPUS if name in ("--gpus-per-node", "--gpus", "-G") else pattern
        found[size] = number_word(word, pattern)
    return found


def number_word(word: Word, pattern: re.Pattern[str] = _PLAIN) -> Word:
    """The number in a word, with its place; a word without a text where the pattern fails."""
    match = None if word.text is None else pattern.fullmatch(word.text)
    if match is None:
        return replace(word, text=None, place=None, why=word.why or "it is not a number")
    place = word.place
    if place is not None:
        start = place.end - len(word.text or "") + match.start(1)
        place = TextPlace(line=place.line, start=start, end=start + len(match[1]))
    return replace(word, text=match[1], place=place)


def batch_head(file: JobFile) -> dict[Size, Word]:
    """The sizes that the head states; it ends before the first command."""
    found: dict[Size, Word] = {}
    position = 0
    for number, line in enumerate(file.text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found |= slurm_sizes(_slurm_options(line, number, position))
        position += len(line) + 1
    return found


def _slurm_options(line: str, number: int, position: int) -> Iterator[tuple[str, Word]]:
    """The options of a line of the head, each with the place of its value in the file."""
    text = re.split(r"\s#", line[len("#SBATCH") :], maxsplit=1)[0]
    first = position + len("#SBATCH")
    for match in re.finditer(r"(?<!\S)(--[\w-]+|-\w)(?:=|[ \t]+|(?<=\s-\w))([^\s-]\S*)", text):
        start = first + match.start(2)
        place = TextPlace(line=number, start=start, end=start + len(match[2]))
        said = f"#SBATCH {match[0]}"
        yield match[1], Word(text=match[2], said=said, line=number, place=place)


def slurm_variables(sizes: Mapping[Size, Word], *, is_slurm: bool) -> dict[str, Value]:
    """The variables of a batch script, as far as its head states them; `is_slurm`: it has one."""
    given = dict(sizes)
    found = {}
    for name in _ALWAYS_SET if is_slurm else ():
        why = f"{name} is not known before the job runs"
        found[name] = Value(((TextPiece(None, said=f"${name}", why=why, is_filled=True),),))
    nodes, per_node = _number(given.get("nodes")), _number(given.get("tasks_per_node"))
    if "tasks" not in given and nodes and per_node:
        said = f"{given['nodes'].said}, {given['tasks_per_node'].said}"
        given["tasks"] = Word(text=str(nodes * per_node), said=said, line=given["nodes"].line)
    gpus = _number(given.get("gpus"))
    if "gpus_per_node" not in given and nodes and gpus and gpus % nodes == 0:
        given["gpus_per_node"] = replace(given["gpus"], text=str(gpus // nodes), place=None)
    return found | {
        name: Value((_pieces(given[size]),))
        for name, size in SLURM_VARIABLES.items()
        if size in given
    }


def _pieces(word: Word) -> tuple[TextPiece, ...]:
    if word.text is None:
        return unknown(word.said, word.why)
    return (TextPiece(word.text, start=None if word.place is None else word.place.start),)


def _number(word: Word | None) -> int | None:
    return None if word is None or word.text is None else int(word.text)
