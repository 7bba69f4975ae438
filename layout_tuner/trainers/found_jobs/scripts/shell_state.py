"""The state of a shell script: variables, the files that it writes, and what is not known."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
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
from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    UNSET,
    Code,
    Pieces,
    TextPiece,
    Value,
    appended,
    file_text,
    known_text,
    merged,
    said_text,
    shortened,
    spaced,
    unknown,
)

if TYPE_CHECKING:
    from tree_sitter import Node

ASSIGNING: Final = ("read", "mapfile", "readarray", "getopts", "let", "printf")
"""Commands that assign to variables which their words name."""

MAX_ERRORS: Final = 5
"""Most places of a script that are named where its code cannot be read."""

COUNTER: Final = re.compile(
    r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""An assignment within `(( ... ))`."""

_OWN_FOLDER: Final = re.compile(
    r'^\$\(\s*dirname\s+"?\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?\})"?\s*\)'
)
"""The folder of the script, which is the one where it is taken to be started."""


@dataclass(frozen=True)
class Redirects:
    """Where a command's output goes, and the text that it is given."""

    path: str | None = None
    is_append: bool = False
    document: Pieces | None = None


@dataclass
class ShellState:
    """What commands of a script change."""

    variables: dict[str, Value]
    exported: set[str]
    written: dict[str, Pieces] = field(default_factory=dict)
    directory: str = ""
    """As of `ProgramStart`."""
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

    def _redirects(self, nodes: Sequence[Node]) -> Redirects:
        found = Redirects()
        for each in nodes:
            if each.type == "file_redirect":
                found = self._file_redirect(each, found)
            elif each.type == "heredoc_redirect":
                found = replace(found, document=self._document(each))
                for inner in each.named_children:
                    if inner.type == "file_redirect":
                        found = self._file_redirect(inner, found)
        return found

    def _file_redirect(self, node: Node, found: Redirects) -> Redirects:
        target = node.child_by_field_name("destination")
        operators = [each.type for each in node.children]
        descriptor = node.child_by_field_name("descriptor")
        is_output = descriptor is None or self._said(descriptor) == "1"
        if target is None or not is_output or not {">", ">>", ">|"} & set(operators):
            return found
        path = said_text(self._expander.text(self._code, *self._places(target)))
        return replace(found, path=posixpath.normpath(path), is_append=">>" in operators)

    def _document(self, node: Node) -> Pieces:
        start = next((each for each in node.children if each.type == "heredoc_start"), None)
        body = next((each for each in node.children if each.type == "heredoc_body"), None)
        if body is None or start is None:
            return ()
        places = self._places(body)
        if re.search(r"['\"\\]", self._said(start)):
            return tuple(self._code.pieces(*places))
        return self._expander.text(self._code, *places, quotes="document")

    def _write(self, name: str | None, arguments: Sequence[Pieces], redirects: Redirects) -> None:
        """Keeps what `cat <<EOF > FILE` and `echo TEXT > FILE` write."""
        path, document = redirects.path, redirects.document
        content = unknown(path or "", "it is written by a command, and nothing is executed")
        if name == "tee":
            names = [said_text(each) for each in arguments if not said_text(each).startswith("-")]
            path = posixpath.normpath(names[0]) if names else None
            content = content if document is None else document
        elif name == "echo":
            plain = [each for each in arguments if said_text(each) not in ("-e", "-n")]
            content = (*spaced(plain), TextPiece("\n"))
        elif name == "cat" and document is not None and not arguments:
            content = document
        if path is not None:
            before = self._state.written.get(path, ()) if redirects.is_append else ()
            self._state.written[path] = merged((*before, *content))

    def _known_files(self) -> dict[str, str]:
        """The files by path, and by name alone: a program often names one by another path."""
        written = self._state.written
        texts = {path: text for path, each in written.items() if (text := file_text(each))}
        return {posixpath.basename(path): text for path, text in texts.items()} | texts


def _joined_files(written: Sequence[dict[str, Pieces]], why: str) -> dict[str, Pieces]:
    """What files hold that each alternative writes; of one that differs it is not known."""
    names = dict.fromkeys(name for each in written for name in each)
    return {
        name: written[0][name]
        if all(each.get(name) == written[0].get(name) for each in written)
        else unknown(name, why)
        for name in names
    }


def errors(root: Node) -> list[Node]:
    """The first places that the grammar cannot take."""
    found: list[Node] = []
    stack = [root]
    while stack and len(found) < MAX_ERRORS:
        node = stack.pop()
        if node.type == "expansion":
            continue  # `shell_expansion` reads what is in it
        if node.is_error or node.is_missing:
            found.append(node)
        elif node.has_error:
            stack += reversed(node.children)
    return found


def unclosed(node: Node) -> Node | None:
    """Where a quote or bracket begins that is never closed; None: the error is another one."""
    if node.is_missing:
        return (node.parent or node) if node.type in ('"', "'", "`", ")") else None
    text = (node.text or b"").strip()
    whole = b"" if node.parent is None else (node.parent.text or b"").strip()
    is_open = text[:1] in (b"'", b'"') and text.count(text[:1]) == 1 and whole.endswith(text)
    return node if is_open else None


def words_behind_redirects(statement: Node) -> list[Node]:
    """Words of a command that stand behind redirections: `torchrun a.py > log --b`."""
    return [
        word
        for each in statement.children_by_field_name("redirect")
        if each.type == "file_redirect"
        for word in each.children_by_field_name("destination")[1:]
    ]


def branches(node: Node) -> Iterator[tuple[list[Node] | None, list[Node]]]:
    """Conditions and statements of each branch of an `if`; None: it is the `else`."""
    yield _branch(node)
    for each in node.named_children:
        if each.type == "elif_clause":
            yield _branch(each)
        elif each.type == "else_clause":
            yield None, each.named_children


def _branch(node: Node) -> tuple[list[Node], list[Node]]:
    conditions: list[Node] = []
    body: list[Node] = []
    current = conditions
    for each in node.children:
        if each.type == "then":
            current = body
        elif each.is_named and each.type not in ("comment", "elif_clause", "else_clause"):
            current.append(each)
    return conditions, body


def assigned_names(node: Node) -> dict[str, bool]:
    """Variables that code assigns to, and whether it only appends to each."""
    found: dict[str, bool] = {}
    stack = [node]
    while stack:
        each = stack.pop()
        stack += each.children
        name = None
        if each.type == "variable_assignment":
            name = each.child_by_field_name("name")
        elif each.type in ("for_statement", "select_statement"):
            name = each.child_by_field_name("variable")
        elif each.type in ("command", "test_command"):
            text = (each.text or b"").decode()
            if text.startswith("(("):
                names = [match[1] or match[2] for match in COUNTER.finditer(text)]
            elif re.match(rf"(?:{'|'.join(ASSIGNING)})\s", text):
                names = re.findall(r"(?<![\w$-])[A-Za-z_]\w*", text)[1:]
            else:
                names = []
            found |= dict.fromkeys(names, False)
        if name is not None and (match := re.match(r"\w+", (name.text or b"").decode())):
            is_append = any(child.type == "+=" for child in each.children)
            found[match[0]] = found.get(match[0], True) and is_append
    return found
