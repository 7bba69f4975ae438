"""The state of a shell script that is read: variables, files, and what is not understood."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from layout_tuner.trainers.found_jobs.found_job import NotUnderstood
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.scripts.shell_branches import (
    doubted_variables,
    joined_variables,
)
from layout_tuner.trainers.found_jobs.scripts.shell_expansion import Expander
from layout_tuner.trainers.found_jobs.scripts.shell_scan import end_of_word
from layout_tuner.trainers.found_jobs.scripts.shell_tree import assigned_names
from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    UNSET,
    Code,
    Pieces,
    Value,
    appended,
    known_text,
    merged,
    said_text,
    shortened,
    unknown,
)

if TYPE_CHECKING:
    from tree_sitter import Node


_OWN_FOLDER: Final = re.compile(
    r'^\$\(\s*dirname\s+"?\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?\})"?\s*\)'
)
"""The folder of the script, which is the one where it is taken to be started."""


@dataclass
class ShellState:
    """What commands of a script change."""

    variables: dict[str, Value]
    exported: set[str]
    written: dict[str, Pieces] = field(default_factory=dict)
    directory: str = ""
    """As of `LaunchCommand`."""
    is_ended: bool = False

    def enter(self, said: str, *, is_known: bool) -> None:
        """Goes to a folder (`cd`): of what is not known the path stays as the script says it."""
        own = _OWN_FOLDER.sub(".", said)
        path = posixpath.join(self.directory, "$OLDPWD" if said == "-" else own)
        is_plain = (is_known or own != said) and not re.search(r"[$`]", path)
        self.directory = posixpath.normpath(path) if is_plain else path

    def copy(self) -> ShellState:
        return replace(
            self,
            variables=dict(self.variables),
            exported=set(self.exported),
            written=dict(self.written),
        )


class ScriptState:
    """The state behind the statements that were read, and the code that they stand in."""

    def __init__(self, file: JobFile, variables: dict[str, Value]) -> None:
        self._file = file
        self._state = ShellState(variables, set(variables))
        self._expander = Expander(variables, file.name)
        self._notes: list[NotUnderstood] = []
        self._code = Code(())
        self._position = 0

    @property
    def _line(self) -> int:
        """Where the statement begins that is read."""
        return self._file.line_of(self._position)

    def _places(self, node: Node) -> tuple[int, int]:
        return self._code.position(node.start_byte), self._code.position(node.end_byte)

    def _said(self, node: Node) -> str:
        return self._code.said(*self._places(node))

    def _note(self, said: str, why: str) -> None:
        self._notes.append(self._condition(said, why))

    def _assign(self, name: str, value: Value) -> None:
        self._expander.assign(name, value)

    def _assignment(self, node: Node) -> int:
        """Assigns a value, and returns the place behind it."""
        name, is_append, value, behind = self._assigned_value(node)
        before = self._state.variables.get(name)
        if is_append and before is not None:
            value = appended(before, value)
        elif is_append and not value.is_array:
            said = unknown(f"${name}", f"{name} is not set in the script")
            value = Value(((*said, *(value.elements[0] if value.elements else ())),))
        self._assign(name, value)
        return behind

    def _assigned_value(self, node: Node) -> tuple[str, bool, Value, int]:
        """Name, whether it is appended, value, and the place behind it.

        The grammar ends some words too early, as `x$Y/`: the place is that of the whole word.
        """
        text = self._code.text
        first, last = self._places(node)
        named = node.child_by_field_name("name")
        behind = last if named is None else self._places(named)[1]
        match = re.match(r"\w*", text[first:behind])
        name = match[0] if match else ""
        is_append = text.startswith("+=", behind)
        at = behind + (2 if is_append else 1)
        value = node.child_by_field_name("value")
        if named is None or named.type == "subscript":
            said = unknown(self._said(node), "elements with an index are not read")
            return name, False, Value((said,), is_array=True), last
        if value is not None and value.type == "array":
            start, end = self._places(value)
            elements = self._expander.array(self._code, start + 1, end - 1)
            return name, is_append, Value(elements, True), end
        end = end_of_word(text, at, len(text), ";&|<>()")
        if value is not None and end < self._places(value)[1]:
            why = "the shell code cannot be read"
            self._note(self._said(node), why)
            for each in re.findall(r"(\w+)\+?=", self._code.text[end : self._places(value)[1]]):
                self._assign(each, Value((unknown(f"${each}", why),)))
        return name, is_append, Value((self._expander.text(self._code, at, end),)), end

    def _declaration(self, node: Node) -> None:
        keyword = node.children[0].type
        is_export = keyword == "export"
        for each in node.children[1:]:
            names = list(assigned_names(each))
            if each.type == "variable_assignment":
                self._assignment(each)
            elif each.type in ("variable_name", "word"):
                text = self._said(each)
                is_export = is_export or bool(re.fullmatch(r"-\w*x\w*", text))
                names = [text]
            elif each.is_named and each.type != "comment":
                names = []
                for pieces in self._expander.fields(self._code, *self._places(each)):
                    match = re.match(r"([A-Za-z_]\w*)=", said_text(pieces[:1]))
                    if match:
                        rest = (pieces[0].part(match.end(), len(pieces[0].text or "")), *pieces[1:])
                        self._assign(match[1], Value((merged(rest),)))
                        names.append(match[1])
            if is_export:
                self._state.exported.update(names)

    def _unset(self, node: Node) -> None:
        for each in node.named_children:
            if not (name := self._said(each)).startswith("-"):
                self._assign(name, UNSET)

    def _take_arguments(self, words: Sequence[Pieces]) -> dict[str, Value]:
        """Takes words as the arguments `$@` and `$1`, and returns the former ones."""
        former = self._remove_arguments()
        self._assign("@", Value(tuple(words), is_array=True))
        known = next((at for at, each in enumerate(words) if known_text(each) is None), len(words))
        for at, each in enumerate(words[:known], 1):
            self._assign(str(at), Value((each,)))
        for at in range(known + 1, 10) if known < len(words) else ():
            why = "it is behind an argument that is not known"
            self._assign(str(at), Value((unknown(f"${at}", why),)))
        return former

    def _remove_arguments(self) -> dict[str, Value]:
        variables = self._state.variables
        names = [each for each in variables if each == "@" or each.isdigit()]
        return {name: variables.pop(name) for name in names}

    def _doubt(self, why: str) -> None:
        """Goes on behind code that may set each variable."""
        self._state.variables = doubted_variables(self._state.variables, why)
        self._set(self._state)

    def _set(self, state: ShellState) -> None:
        self._state = state
        self._expander.variables = state.variables

    def _join(self, states: Sequence[ShellState], condition: NotUnderstood) -> None:
        """Goes on with what is common to several states."""
        alive = [each for each in states if not each.is_ended]
        if not alive:
            self._state.is_ended = True
            return
        why = f"it depends on `{condition.said}` in line {condition.line}, and {condition.why}"
        self._set(
            ShellState(
                joined_variables([each.variables for each in alive], why),
                set().union(*(each.exported for each in alive)),
                _joined_files([each.written for each in alive], why),
                alive[0].directory if len({each.directory for each in alive}) == 1 else "$PWD",
            )
        )

    def _condition(self, said: str, why: str) -> NotUnderstood:
        return NotUnderstood(said=shortened(said), why=why, line=self._line)


def _joined_files(written: Sequence[dict[str, Pieces]], why: str) -> dict[str, Pieces]:
    """What files hold that each alternative writes; of one that differs it is not known."""
    names = dict.fromkeys(name for each in written for name in each)
    return {
        name: written[0][name]
        if all(each.get(name) == written[0].get(name) for each in written)
        else unknown(name, why)
        for name in names
    }
