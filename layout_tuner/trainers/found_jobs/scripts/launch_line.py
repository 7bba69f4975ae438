"""The program of a command, behind its launchers and containers, and the ranks that they start."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from layout_tuner.trainers.found_jobs.found_job import NotUnderstood, ReadValue, TextPlace
from layout_tuner.trainers.found_jobs.program_command import CONDITIONAL, Option, Word, value_of
from layout_tuner.trainers.found_jobs.scripts.batch_head import Size, number_word, slurm_sizes
from layout_tuner.trainers.found_jobs.scripts.launch_fronts import (
    FRONTS,
    MODULES,
    PYTHON_VALUES,
    Front,
)

ProgramKind = Literal["program", "shell text", "shell file"]
"""`shell text` is that of `bash -c`; `shell file` is a script that a shell runs."""

_PYTHON: Final = re.compile(r"python[\d.]*")
_SHELLS: Final = ("bash", "sh", "dash", "zsh", "ksh")
_COMMANDS: Final = ("run_train.sh",)
"""Programs that start trainers, and are neither a Python file nor behind a launcher."""

_OF_PYTHON: Final = ("torchrun", "deepspeed", "accelerate")
"""Launchers that start Python."""

_NODES: Final = re.compile(r"(\d+)(?::\1)?")


@dataclass(kw_only=True)
class LaunchLine:
    """What stands before a program: launcher, container, sizes and variables."""

    sizes: dict[Size, Word] = field(default_factory=dict)
    """Of the script's head, or of srun."""
    launcher: str = ""
    options: tuple[Option, ...] = ()
    """Those of the launcher; of several, the last one's."""
    container: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    """As of `ProgramStart`."""
    notes: list[NotUnderstood] = field(default_factory=list)
    has_unknown_words: bool = False
    """Whether the launcher has words that are not known: they may be options of any name."""
    interpreter: tuple[str, ...] = ("python",)
    """Words of Python before the program; empty: it is none of Python's."""
    is_program: bool = False
    """Whether the next word is the program, whatever its name."""

    def copy(self) -> LaunchLine:
        return replace(
            self, sizes=dict(self.sizes), environment=dict(self.environment), notes=list(self.notes)
        )

    def miss(self, said: str, why: str, line: int, name: str = "") -> None:
        self.notes.append(NotUnderstood(said=said, why=why, field=name, line=line))

    def ranks(self) -> Iterator[ReadValue]:
        """What is known of `num_nodes`, `devices_per_node` and `num_devices`; notes the rest."""
        sizes = self.sizes
        nodes, per_node = sizes.get("nodes"), sizes.get("gpus_per_node")
        if self.launcher == "torchrun":
            yield from self._rank("num_nodes", ("nnodes",), nodes, 1)
            yield from self._rank("devices_per_node", ("nproc_per_node",), per_node, 1)
        elif self.launcher == "deepspeed" and (option := self._option("include")):
            why = "a list of devices of each node is not read"
            self.miss(option.said, why, option.word.line, "num_devices")
        elif self.launcher == "deepspeed":
            yield from self._rank("num_nodes", ("num_nodes",), nodes)
            yield from self._rank("devices_per_node", ("num_gpus", "num_accelerators"), per_node)
        elif self.launcher == "accelerate":
            yield from self._rank("num_devices", ("num_processes",), None)
            yield from self._rank("num_nodes", ("num_machines",), nodes)
        elif self.launcher in ("srun", "mpirun"):
            per_node, devices = sizes.get("tasks_per_node"), sizes.get("tasks")
            is_mpi = self.launcher == "mpirun"
            yield from self._rank("num_nodes", (), nodes)
            names = ("npernode", "N", "ppn") if is_mpi else ()
            yield from self._rank("devices_per_node", names, per_node)
            yield from self._rank("num_devices", ("np", "n") if is_mpi else (), devices)
        else:
            yield from self._rank("num_nodes", (), nodes)
            yield from self._rank("devices_per_node", (), sizes.get("tasks_per_node", per_node))

    def _option(self, *names: str) -> Option | None:
        """The last option of these names, which are written with underscores."""
        for each in reversed(self.options):
            if each.name.lstrip("-").replace("-", "_") in names and each.values:
                return each
        return None

    def _rank(
        self, name: str, options: Sequence[str], otherwise: Word | None, default: int | None = None
    ) -> Iterator[ReadValue]:
        option = self._option(*options)
        if option is not None:
            word = _certain(option.values[0], option.word)
            number = number_word(word, _NODES if name == "num_nodes" else re.compile(r"(\d+)"))
            if number.text is not None:
                yield _read(name, number, option.said)
                return
            is_known = otherwise is not None and otherwise.text is not None
            self.miss(option.said, number.why, number.line, "" if is_known else name)
        elif default is not None and not self.has_unknown_words:
            yield from self._by_default(name, options[0], otherwise, default)
            return
        if otherwise is not None and otherwise.text is not None:
            yield _read(name, otherwise, otherwise.said)
        elif otherwise is not None and option is None:
            self.miss(otherwise.said, otherwise.why, otherwise.line, name)

    def _by_default(
        self, name: str, option: str, head: Word | None, default: int
    ) -> Iterator[ReadValue]:
        """What torchrun starts without an option: its variable counts, and no script's head."""
        variable = f"PET_{option.upper()}"
        text = self.environment.get(variable, "")
        if text.isdecimal():
            yield ReadValue(field=name, value=int(text), said=f"{variable}={text}")
        elif head is None or head.text == str(default):
            said = f"{self.launcher} without --{option}"
            yield ReadValue(field=name, value=default, said=said)
        else:
            why = f"{self.launcher} starts {default} without --{option}"
            self.miss(head.said, why, head.line, name)


def _read(name: str, number: Word, said: str) -> ReadValue:
    return ReadValue(field=name, value=int(number.text or 0), said=said, place=number.place)


def program_of(
    words: Sequence[Word], outer: LaunchLine
) -> tuple[LaunchLine, ProgramKind, int] | None:
    """What a command starts, and where among its words that begins; None: no training.

    Args:
        words: the command.
        outer: what stands before it already, as before `bash -c`; it is not changed.
    """
    line = outer.copy()
    at: int | None = 0
    while at is not None and at < len(words):
        word = words[at]
        name = posixpath.basename(word.text or "")
        is_file = word.text is None and word.said.endswith(".py")
        if line.is_program or is_file or (line.launcher and word.text is None):
            return line, "program", at
        if name in _SHELLS:
            return _shell(words, at, line)
        behind = _behind(words, at, line)
        if behind == at:
            if line.launcher or name.endswith(".py") or name in _COMMANDS:
                if not name.endswith(".py") and line.launcher not in _OF_PYTHON:
                    line.interpreter = ()
                return line, "program", at
            is_shell = (word.text or "").startswith(("./", "/")) or name.endswith(".sh")
            return (line, "shell file", at) if is_shell else None
        at = behind
    return None


def _behind(words: Sequence[Word], at: int, line: LaunchLine) -> int | None:
    """The place behind what stands before a program; `at`: nothing; None: nothing is started."""
    word = words[at]
    if word.text is None:
        line.miss(word.said, word.why, word.line)
        line.has_unknown_words = True
        return _next_program(words, at + 1, len(words))
    if assigned := re.match(r"([A-Za-z_]\w*)=(.*)", word.text, re.DOTALL):
        line.environment[assigned[1]] = assigned[2]
        return at + 1
    name = posixpath.basename(word.text)
    if _PYTHON.fullmatch(name):
        return _behind_python(words, at, line)
    return _behind_front(words, at, FRONTS[name], line) if name in FRONTS else at


def _behind_front(words: Sequence[Word], at: int, front: Front, line: LaunchLine) -> int | None:
    """Where the program of a front begins; None: it starts none."""
    first = at
    at += 1
    while front.subcommands and at < len(words) and words[at].text in front.subcommands:
        at += 1
    if front.subcommands and at == first + 1:
        return None
    options, at = _options(words, at, front, line)
    at += front.num_words
    if front.kind == "container":
        line.container += tuple(each.said for each in words[first:at])
    if front.kind == "launcher":
        line.launcher, line.options = front.launcher, tuple(options)
        names = {each.name.replace("_", "-") for each in options}
        line.is_program = bool(names & {"-m", "--module"})
        line.interpreter = ("python", "-m") if line.is_program else ("python",)
        line.interpreter = () if "--no-python" in names else line.interpreter
        if front.launcher == "srun":
            said = ((each.name, replace(_value(each), said=each.said)) for each in options)
            line.sizes |= slurm_sizes(said)
            line.lost += tuple(
                each.said for each in options if each.name.startswith("--container-")
            )
    return at if at < len(words) else None


def _value(option: Option) -> Word:
    if not option.values:
        return replace(option.word, text=None, why="it has no value")
    return _certain(option.values[0], option.word)


def _certain(value: Word, option: Word) -> Word:
    """A value that is not known where it is not certain that the command has it."""
    if value.is_certain and option.is_certain:
        return value
    return replace(value, text=None, why=value.why or CONDITIONAL)


def _options(
    words: Sequence[Word], at: int, front: Front, line: LaunchLine
) -> tuple[list[Option], int]:
    """The options of a front, and where they end."""
    found: list[Option] = []
    is_lost = False
    while at < len(words):
        word = words[at]
        text = word.prefix if word.text is None else word.text
        if word.text is None and not text.startswith("-"):
            line.has_unknown_words = True
            is_module = any(each.text in ("-m", "--module") for each in words[at + 1 :])
            if not is_module and _next_program(words, at + 1, 0) == 0:
                break  # nothing behind it looks like the program: it is the program itself
            line.miss(word.said, word.why, word.line)
            is_lost = not is_module
            at += 1
            continue
        if not text.startswith("-") or text == "-":
            break
        at += 1
        if text == "--":
            break
        name, equals, value = text.partition("=")
        if equals:
            found.append(Option(name=name, word=word, values=(value_of(word, value),)))
            continue
        if front.joins_short_values and re.match(r"-\w.", text) and text not in front.switches:
            if text[:2] not in front.switches:
                found.append(_joined_option(word))
            continue
        values = tuple(words[at : at + front.num_values(text)])
        found.append(Option(name=text, word=word, values=values))
        at += len(values)
    if is_lost and at < len(words) and not _is_program(words[at]):
        at = _next_program(words, at, at)
    return found, at


def _joined_option(word: Word) -> Option:
    """`-N2` as an option with its value."""
    text = word.prefix if word.text is None else word.text
    place = word.place
    if place is not None:
        place = TextPlace(line=place.line, start=place.start + 2, end=place.end)
    value = None if word.text is None else text[2:]
    values = (replace(word, text=value, said=word.said[2:], place=place),)
    return Option(name=text[:2], word=replace(word, said=text[:2]), values=values)


def _is_program(word: Word) -> bool:
    name = posixpath.basename(word.said)
    return name.endswith(".py") or name in FRONTS or _PYTHON.fullmatch(name) is not None


def _next_program(words: Sequence[Word], first: int, otherwise: int) -> int:
    """Where the next word stands that looks like a program or a launcher."""
    for number in range(first, len(words)):
        if _is_program(words[number]):
            return number
    return otherwise


def _behind_python(words: Sequence[Word], at: int, line: LaunchLine) -> int | None:
    """Where the program of `python ...` begins."""
    first = at
    at += 1
    while at < len(words) and (text := words[at].text) is not None and text.startswith("-"):
        at += 1
        if text == "-c":
            return None
        if re.fullmatch(r"-[a-zA-Z]*m", text):
            if at < len(words) and (front := MODULES.get(words[at].text or "")):
                return _behind_front(words, at, front, line)
            break
        at += int(text in PYTHON_VALUES)
    line.is_program = True
    line.interpreter = tuple(each.said for each in words[first:at])
    return at if at < len(words) else None


def _shell(
    words: Sequence[Word], at: int, line: LaunchLine
) -> tuple[LaunchLine, ProgramKind, int] | None:
    """`bash -c TEXT` and `bash FILE`."""
    at += 1
    while at < len(words):
        text = words[at].text
        if text is None or not text.startswith(("-", "+")):
            is_command = posixpath.basename(text or "") in _COMMANDS
            return line, "program" if is_command else "shell file", at
        at += 1
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", text):
            return (line, "shell text", at) if at < len(words) else None
        at += int(text in ("-o", "+o", "-O", "+O"))
    return None
