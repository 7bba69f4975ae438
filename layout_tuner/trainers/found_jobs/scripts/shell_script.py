"""A launch script, read statically: the programs that it starts, with their words expanded.

tree-sitter-bash finds statements and commands in the text; what a word expands to is found by
`shell_expansion`. Nothing is executed. What depends on something outside the script is a word that
is not known, or a note with the reason.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError, NotUnderstood
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand
from layout_tuner.trainers.found_jobs.scripts.batch_head import batch_head, slurm_variables
from layout_tuner.trainers.found_jobs.scripts.launch_line import LaunchLine, program_of
from layout_tuner.trainers.found_jobs.scripts.shell_conditions import (
    either,
    matches,
    opposite,
    test_holds,
)
from layout_tuner.trainers.found_jobs.scripts.shell_state import (
    ASSIGNING,
    COUNTER,
    Redirects,
    ScriptState,
    ShellState,
    assigned_names,
    branches,
    errors,
    unclosed,
    words_behind_redirects,
)
from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    UNSET,
    Code,
    Pieces,
    TextPiece,
    Value,
    known_text,
    merged,
    said_text,
    spaced,
    unknown,
    without_placeholders,
    word_from,
)

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_NESTING: Final = 60
"""Most statements within one another, with those of `bash -c` and `eval`."""

MAX_STATEMENTS: Final = 20_000
"""Most statements that are read, those of functions at each call."""

_HARMLESS: Final = (":", "echo", "mkdir", "return", "trap", "wait", "tee", "cat", "shopt")
"""Commands that start no program, and change nothing that is read."""

_SUCCEEDING: Final = (*_HARMLESS, "cd", "export", "set", "shift")
"""Commands that are taken to succeed, before `&&` and `||`."""

_HARMLESS_SOURCE: Final = re.compile(
    r"(?:^|/)(?:activate|\.?(?:bashrc|bash_profile|profile)|(?:conda|mamba|setvars)\.sh)$"
    r"|^/(?:etc|opt|usr)/"
)
"""Names of files that set up an environment, and state nothing of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedProgram:
    """A program that a script starts."""

    command: ProgramCommand
    written: Mapping[str, str]
    """Files that the script writes before, by path as the script says it."""


def started_programs(file: JobFile) -> list[StartedProgram]:
    """The programs that a script starts.

    Raises:
        JobFileInvalidError: it is no shell code, or is nested or expands beyond all measure.
    """
    reader = _ScriptReader(file)
    reader.read()
    return reader.found


class _ScriptReader(ScriptState):
    def __init__(self, file: JobFile) -> None:
        self._whole = self._outer = LaunchLine(sizes=batch_head(file))
        is_slurm = "#SBATCH" in file.text
        super().__init__(file, slurm_variables(self._whole.sizes, is_slurm=is_slurm))
        self.found: list[StartedProgram] = []
        self._conditions: list[NotUnderstood] = []
        self._functions: dict[str, tuple[Node, Code]] = {}
        self._active: set[str] = set()
        self._depth = 0
        self._num_statements = 0
        self._statements: dict[str, Callable[[Node], object]] = {
            "command": self._command,
            "redirected_statement": self._redirected,
            "variable_assignment": self._assignment,
            "declaration_command": self._declaration,
            "unset_command": self._unset,
            "if_statement": self._if,
            "case_statement": self._case,
            **dict.fromkeys(
                ("for_statement", "c_style_for_statement", "while_statement"), self._loop
            ),
            "function_definition": self._function,
            "list": self._list,
            **dict.fromkeys(("pipeline", "subshell"), self._apart),
            "compound_statement": self._compound,
            **dict.fromkeys(
                ("variable_assignments", "do_group", "negated_command"), self._each_statement
            ),
            "test_command": self._test,
            "ERROR": self._broken,
        }

    # Code and its statements.

    def read(self) -> None:
        """Reads the whole script."""
        self.run((TextPiece(self._file.text, 0),), self._whole)

    def run(self, pieces: Pieces, outer: LaunchLine) -> None:
        """Reads code: the file's own, or one that a command runs in the same shell."""
        import tree_sitter
        import tree_sitter_bash

        saved = self._code, self._outer, self._position
        self._code, self._outer = Code(list(without_placeholders(pieces))), outer
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        tree = parser.parse(self._code.content)
        for each in errors(tree.root_node) if tree.root_node.has_error else ():
            begin = unclosed(each)
            self._position = self._code.start(self._places(begin or each)[0]) or self._position
            if begin is not None:
                raise JobFileInvalidError(
                    f"{self._file.name}: a quote or bracket in line {self._line} is never closed"
                )
            self._note(self._said(each) or "here", "the shell code cannot be read")
        self._each_statement(tree.root_node)
        self._code, self._outer, self._position = saved

    def _each_statement(self, node: Node) -> None:
        self._run(node.children)

    def _compound(self, node: Node) -> None:
        if self._said(node).startswith("(("):
            self._test(node)  # the grammar takes `((N *= 2))` for `{ ... }`
        else:
            self._each_statement(node)

    def _run(self, nodes: Iterable[Node]) -> None:
        for each in nodes:
            if each.is_named:
                self._statement(each)

    def _statement(self, node: Node) -> None:
        handler = self._statements.get(node.type)
        if handler is None or self._state.is_ended:
            return
        self._depth += 1
        self._num_statements += 1
        self._refuse_endless()
        start = self._code.start(self._places(node)[0])
        if start is not None:
            self._position = start
        handler(node)
        self._depth -= 1

    def _refuse_endless(self) -> None:
        problem = ""
        if self._depth > MAX_NESTING:
            problem = f"its statements are nested over {MAX_NESTING} deep"
        elif self._num_statements > MAX_STATEMENTS:
            problem = f"it has over {MAX_STATEMENTS} statements"
        if problem:
            raise JobFileInvalidError(
                f"{self._file.name}: {problem}; give a file with the plain command"
            )

    def _broken(self, node: Node) -> None:
        why = "it cannot be read as shell code"
        self._under(self._condition(self._said(node), why), node.children)
        for name in assigned_names(node):
            self._assign(name, Value((unknown(f"${name}", why),)))

    def _fork(self, nodes: Iterable[Node], condition: NotUnderstood | None) -> ShellState:
        """The state behind statements of which it is not known whether they run."""
        before = self._state
        self._set(before.copy())
        self._expander.count([()] * (len(before.variables) // 8))
        if condition is None:
            self._run(nodes)
        else:
            self._under(condition, nodes)
        after = self._state
        self._set(before)
        return after

    def _under(self, condition: NotUnderstood, nodes: Iterable[Node]) -> None:
        self._conditions.append(condition)
        self._run(nodes)
        self._conditions.pop()

    def _if(self, node: Node) -> None:
        states: list[ShellState] = []
        undecided: NotUnderstood | None = None
        for conditions, body in branches(node):
            holds: bool | None = True
            if conditions is not None:
                self._run(conditions[:-1])
                holds = self._holds(conditions[-1]) if conditions else None
            if holds is False:
                continue
            if holds and not states:
                self._run(body)
                return
            if holds is None and conditions:
                said = f"if {self._said(conditions[-1])}"
                undecided = self._condition(said, "whether it holds is not known")
            if undecided is not None:
                states.append(self._fork(body, undecided))
            if holds:
                break
        else:
            states.append(self._state)
        if undecided is not None:
            self._join(states, undecided)

    def _holds(self, node: Node) -> bool | None:
        """Whether a condition holds; its assignments are made."""
        first, last = self._places(node)
        text = self._code.text[first:last]
        if text.startswith("(("):
            self._test(node)
            number = self._expander.number(self._code, first + 2, last - 2)
            return None if number is None else bool(number)
        if node.type == "test_command":
            width = 2 if text.startswith("[[") else 1
            return test_holds(
                self._expander, self._code, first + width, last - width, is_extended=width == 2
            )
        if node.type == "negated_command":
            return opposite(self._holds(node.named_children[0])) if node.named_children else None
        if node.type == "list":
            return self._list_holds(node)
        if node.type == "command":
            if match := re.match(r"test\s", text):
                first += match.end()
                return test_holds(self._expander, self._code, first, last, is_extended=False)
            word = known_text(self._expander.text(self._code, first, last))
            if word in ("true", ":", "false"):
                return word != "false"
        self._statement(node)
        return None

    def _test(self, node: Node) -> None:
        """A test as a statement: `((N += 1))` assigns."""
        text = self._said(node)
        for match in COUNTER.finditer(text) if text.startswith("((") else ():
            name = match[1] or match[2]
            self._assign(name, Value((unknown(text, "its arithmetic is not read"),)))

    def _list(self, node: Node) -> None:
        self._list_holds(node)

    def _list_holds(self, node: Node) -> bool | None:
        """Runs `A && B || C`, which is read from the left."""
        rest: list[tuple[bool, Node]] = []
        while node.type == "list" and len(node.named_children) > 1:
            is_and = any(each.type == "&&" for each in node.children)
            rest.append((is_and, node.named_children[-1]))
            node = node.named_children[0]
        holds = self._part_holds(node)
        for is_and, part in reversed(rest):
            if holds is None:
                said = f"{self._said(node)} {'&&' if is_and else '||'}"
                condition = self._condition(said, "whether it holds is not known")
                self._join([self._fork([part], condition), self._state], condition)
            elif holds == is_and:
                holds = self._part_holds(part)
        return holds

    def _part_holds(self, node: Node) -> bool | None:
        is_test = re.match(r"(?:test|true|false|:)(?:\s|$)", self._said(node))
        if is_test or node.type in ("test_command", "negated_command"):
            return self._holds(node)
        num_found = len(self.found)
        self._statement(node)
        words = re.match(r"[^\s=]*", self._said(node))
        is_value = node.type.startswith("variable_assignment") and not re.search(
            r"\$\(|`", self._said(node)
        )
        does = is_value or len(self.found) > num_found or (words and words[0] in _SUCCEEDING)
        return True if does else None

    def _case(self, node: Node) -> None:
        value = node.child_by_field_name("value")
        text = None
        if value is not None:
            text = known_text(self._expander.text(self._code, *self._places(value)))
        said = f"case {self._said(value) if value is not None else ''}"
        condition = self._condition(said, "which of its cases applies is not known")
        states: list[ShellState] = []
        for item in node.named_children:
            if item.type != "case_item":
                continue
            fields = [item.field_name_for_child(each) for each in range(item.child_count)]
            patterns = [
                each for each, name in zip(item.children, fields, strict=True) if name == "value"
            ]
            body = [each for each in item.named_children if each not in patterns]
            applies: bool | None = False
            for each in patterns:
                applies = either(applies, self._matches(text, each))
            if applies and not states:
                self._run(body)
                return
            if applies is not False:
                states.append(self._fork(body, condition))
            if applies:
                break
        else:
            states.append(self._state)
        if len(states) > 1:
            self._join(states, condition)

    def _matches(self, text: str | None, pattern: Node) -> bool | None:
        code = self._said(pattern)
        if code == "*":
            return True
        if text is None:
            return None
        expanded = known_text(self._expander.text(self._code, *self._places(pattern)))
        return matches(text, code, expanded)

    def _loop(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        said = self._said(node).partition("\n")[0]
        condition = self._condition(said, "loops are not run")
        self._repeated(body, condition, node)

    def _repeated(self, body: Node | None, condition: NotUnderstood, node: Node) -> None:
        """Code that runs any number of times, or with arguments that are not known."""
        before = self._state.copy()
        why = f"it is assigned in `{condition.said}`, and {condition.why}"
        for name, is_append in assigned_names(node).items():
            if not is_append:
                self._assign(name, Value((unknown(f"${name}", why),)))
        after = self._fork([] if body is None else [body], condition)
        self._join([before, after], condition)

    def _function(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._functions[self._said(name)] = body, self._code

    def _call(self, name: str, arguments: Sequence[Pieces]) -> None:
        body, code = self._functions[name]
        saved, self._code = self._code, code
        self._active.add(name)
        former = self._take_arguments(arguments)
        condition = self._condition(f"{name}()", "functions are not run")
        self._repeated(body, condition, body)
        self._active.discard(name)
        self._code = saved
        self._remove_arguments()
        self._state.variables.update(former)

    def _apart(self, node: Node) -> None:
        """A pipeline or `( ... )`: what it assigns ends with it."""
        for each in [node] if node.type == "subshell" else node.named_children:
            nodes = each.children if each.type == "subshell" else [each]
            written = self._fork(nodes, None).written
            self._state.written.update(written)

    def _redirected(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        redirects = self._redirects(node.children_by_field_name("redirect"))
        if body is None:
            return
        if body.type == "command":
            # The grammar takes words behind `> log` for further files.
            words = [self._places(each) for each in words_behind_redirects(node)]
            self._command(body, redirects, words)
            return
        self._statement(body)
        if redirects.path is not None:
            why = "it is the output of several commands"
            self._state.written[redirects.path] = unknown(redirects.path, why)

    def _command(
        self,
        node: Node,
        redirects: Redirects | None = None,
        more_words: Sequence[tuple[int, int]] = (),
    ) -> None:
        if self._said(node).startswith("(("):
            self._test(node)
            return
        assigned: list[Node] = []
        places: list[tuple[int, int]] = []
        behind = self._places(node)[0]
        for each in node.children:
            first, last = self._places(each)
            if re.sub(r"\\\r?\n|\s", "", self._code.text[behind:first]):
                self._note(self._code.said(behind, first), "it cannot be read as a word")
            if first < last <= behind:
                continue  # the end of a word that the grammar ends too early
            if each.type == "variable_assignment" and not places:
                assigned.append(each)
                last = self._assigned_value(each)[-1]
            elif each.type in ("file_redirect", "herestring_redirect", "heredoc_redirect"):
                redirects = redirects or self._redirects([each])
            elif places and first == behind and last > first:
                places[-1] = places[-1][0], last
            elif each.type != "comment" and last > first:
                places.append((first, last))
            behind = last
        if places:
            self._expanded([*places, *more_words], assigned, redirects or Redirects())
        else:
            self._run(assigned)

    def _expanded(
        self, places: Sequence[tuple[int, int]], assigned: Sequence[Node], redirects: Redirects
    ) -> None:
        """A command of which the places of its words are known."""
        environment: dict[str, str | None] = {}
        for each in assigned:
            name, _, value, _ = self._assigned_value(each)
            environment[name] = known_text(value.elements[0]) if value.elements else ""
        words: list[Pieces] = []
        for first, last in places:
            words += self._expander.fields(self._code, first, last)
        if words:
            self._words(words, environment, redirects)

    def _words(
        self, words: list[Pieces], environment: Mapping[str, str | None], redirects: Redirects
    ) -> None:
        """A command whose words are expanded."""
        name, arguments = known_text(words[0]), words[1:]
        if redirects.path is not None or name == "tee":
            self._write(name, arguments, redirects)
        if name in ("sbatch", "bash", "sh") and redirects.document is not None:
            self._document_job(redirects.document)
        elif name in self._functions:
            if name not in self._active:
                self._call(name, arguments)
        elif not self._builtin(name, arguments) and name not in _HARMLESS:
            self._start(words, environment)

    def _document_job(self, document: Pieces) -> None:
        """The script of `sbatch <<EOF`, with its own head."""
        file = JobFile(name=self._file.name, text=said_text(document))
        sizes = {name: replace(each, place=None) for name, each in batch_head(file).items()}
        line = self._outer.copy()
        line.sizes |= sizes
        before = self._state.copy()
        variables = slurm_variables(line.sizes, is_slurm="#SBATCH" in file.text)
        self._state.variables.update(variables)
        self._state.exported.update(variables)
        self._inner(document, line, ())
        self._set(before)

    def _builtin(self, name: str | None, arguments: Sequence[Pieces]) -> bool:
        """Runs a command of the shell itself; False: it is none."""
        if name == "exit" or (name == "return" and not self._active):
            self._state.is_ended = True
        elif name in ("source", "."):
            said = said_text(arguments[0]) if arguments else ""
            if not _HARMLESS_SOURCE.search(said):
                self._note(f"{name} {said}", "another script is not read; it may set variables")
                self._doubt(f"`{name} {said}` in line {self._line} may set it")
        elif name in ("cd", "pushd"):
            path = arguments[-1] if arguments else unknown("$HOME", "")
            self._state.enter(said_text(path), is_known=known_text(path) is not None)
        elif name == "set":
            texts = [known_text(each) for each in arguments]
            if "--" in texts:
                self._take_arguments(arguments[texts.index("--") + 1 :])
        elif name == "shift":
            if "@" in self._state.variables:
                self._take_arguments([unknown("$@", "the command shift changes it")])
        elif name == "eval":
            self.run(merged(spaced(arguments)), self._outer)
        elif name in ASSIGNING:
            self._set_by_command(name, arguments)
        else:
            return False
        return True

    def _set_by_command(self, name: str, arguments: Sequence[Pieces]) -> None:
        texts = [known_text(each) or "" for each in arguments]
        if name == "printf":
            texts = texts[1:2] if texts[:1] == ["-v"] else []
        for each in texts:
            if match := re.match(r"[A-Za-z_]\w*", each):
                why = f"the command {name} sets it"
                self._assign(match[0], Value((unknown(f"${match[0]}", why),)))

    def _start(self, words: Sequence[Pieces], environment: Mapping[str, str | None]) -> None:
        """A command that may start a program."""
        outer = self._outer.copy()
        for name in self._state.exported:
            value = self._state.variables.get(name, UNSET)
            text = known_text(value.elements[0]) if value.elements else None
            if text is not None and not name.startswith("SLURM_"):
                outer.environment[name] = text
            elif value.elements and name not in environment and not name.startswith("SLURM_"):
                outer.lost += (f"{name}={said_text(value.elements[0])}",)
        outer.lost += tuple(f"{name}=..." for name, each in environment.items() if each is None)
        outer.environment |= {name: each for name, each in environment.items() if each is not None}
        expanded = [word_from(each, self._file, self._line) for each in words]
        program = program_of(expanded, outer)
        if program is None:
            if expanded[0].said.startswith("-"):
                why = "a comment or an empty line ends the command that it would belong to"
                self._note_behind(" ".join(each.said for each in expanded), why)
            elif expanded[0].text is None:
                self._note(expanded[0].said, f"what it starts is not known: {expanded[0].why}")
            return
        line, kind, at = program
        if kind == "shell text":
            self._inner(words[at], line, words[at + 2 :])
        elif kind == "shell file":
            content = self._state.written.get(posixpath.normpath(expanded[at].said))
            if content is not None:
                self._inner(content, line, words[at + 1 :])
        else:
            ranks = tuple(line.ranks())
            if self._expander.has_arguments:
                why = "the script is read as if it were given no arguments"
                line.miss("$@", why, self._line)
            command = ProgramCommand(
                words=tuple(expanded[at:]),
                launcher=line.launcher,
                launcher_options=line.options,
                ranks=ranks,
                not_understood=(*self._notes, *self._conditions, *line.notes),
                container=line.container,
                environment=line.environment,
                interpreter=line.interpreter,
                working_directory=self._state.directory,
                lost=line.lost,
                line=self._line,
            )
            self.found.append(StartedProgram(command=command, written=self._known_files()))
        if known_text(words[0]) == "exec":
            self._state.is_ended = True

    def _note_behind(self, said: str, why: str) -> None:
        """Notes what is not understood of the command before."""
        if not self.found:
            self._note(said, why)
            return
        last = self.found[-1]
        notes = (*last.command.not_understood, self._condition(said, why))
        self.found[-1] = replace(last, command=replace(last.command, not_understood=notes))

    def _inner(self, pieces: Pieces, line: LaunchLine, arguments: Sequence[Pieces]) -> None:
        """Code that runs in a shell of its own: it has the exported variables alone."""
        before = self._state
        inner = before.copy()
        inner.variables = {
            name: value for name, value in inner.variables.items() if name in inner.exported
        }
        for name, text in line.environment.items():
            inner.variables.setdefault(name, Value(((TextPiece(text),),)))
        self._set(inner)
        self._take_arguments(arguments)
        self._depth += 5  # a parse costs more than a statement
        self._refuse_endless()
        self.run(pieces, line)
        self._depth -= 5
        self._set(before)
