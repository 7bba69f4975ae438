"""Expansions of the shell over variables that a script assigns; nothing is executed.

It follows the manual of bash (Shell Expansions). What depends on a command, on a file or on the
environment is an unknown piece with the reason, never an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, Literal

from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.scripts.shell_arithmetic import (
    ArithmeticUnknownError,
    evaluated,
)
from layout_tuner.trainers.found_jobs.scripts.shell_scan import (
    end_of_ansi_quotes,
    end_of_backticks,
    end_of_expansion,
    end_of_group,
    end_of_single_quotes,
    is_continuation,
    words_between,
)
from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    UNSET,
    Code,
    FieldsBuilder,
    Pieces,
    TextPiece,
    Value,
    is_filled,
    known_text,
    merged,
    said_text,
    uncertain,
    unknown,
    why_unknown,
)

MAX_DEPTH: Final = 50
"""Most expansions within one another."""

MAX_CHARACTERS: Final = 1 << 20
"""Most characters of a value: a file has no more."""

MAX_PIECES: Final = 200_000
"""Most pieces of all values that a script's expansions give: launch scripts have some thousand."""

_MAX_PATTERN: Final = 200
"""Longest text of which a beginning or an end is removed by a pattern."""

_MAX_BRACES: Final = 2000
"""Longest word in which an expansion of braces is looked for."""

Quotes = Literal["none", "default", "double", "document"]
"""Where code stands: `default` is that of `${X:-default}` without quotes, whose result is split;
`document` is the text of a here-document."""

_BARE: Final = ("none", "default")

_ESCAPED: Final = {"double": '$`"\\', "document": "$`\\"}
_PLAIN: Final = {
    "none": re.compile(r"[^\\'\"$`<>]+"),
    "default": re.compile(r"[^\\'\"$`<>]+"),
    "double": re.compile(r'[^\\"$`]+'),
    "document": re.compile(r"[^\\$`]+"),
}
_BRACES: Final = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_PARAMETER: Final = re.compile(
    r"(?P<mark>[#!]?)(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
)


class Expander:
    """The variables of a script, and the texts that its words expand to."""

    def __init__(self, variables: dict[str, Value], name: str) -> None:
        self.variables = variables
        self._name = name
        self.has_arguments = False
        """Whether all arguments of the script were used, which are taken as none."""
        self._num_pieces = 0
        self._depth = 0
        self._default_of = ""

    def count(self, elements: Sequence[Pieces]) -> None:
        """Counts pieces that are made; JobFileInvalidError where a script makes too many."""
        for each in elements:
            self._num_pieces += 1 + len(each) + (sum(len(it.text or "") for it in each) >> 6)
        if self._num_pieces > MAX_PIECES:
            raise JobFileInvalidError(
                f"{self._name}: its variables expand to more than {MAX_PIECES} parts, and launch "
                "scripts have some thousand; give a file with the plain command"
            )

    def assign(self, name: str, value: Value) -> None:
        for each in value.elements:
            if sum(len(piece.text or "") for piece in each) > MAX_CHARACTERS:
                raise JobFileInvalidError(
                    f"{self._name}: the value of {name} grows over {MAX_CHARACTERS >> 20} MB; give "
                    "a file with the plain command"
                )
        self.count(value.elements)
        self.variables[name] = value

    def fields(self, code: Code, first: int, last: int) -> list[Pieces]:
        """The words that one word of the code gives: none, one, or those of an array."""
        builder = FieldsBuilder()
        text = code.text[first:last] if last - first < _MAX_BRACES else ""
        if _BRACES.search(text) and not re.search(r"['\"\\$]", text):
            said = code.said(first, last)
            builder.add(unknown(said, "the expansion of braces is not read"))
        else:
            self._expand(code, first, last, builder, "none")
        builder.end()
        self.count(builder.words)
        return builder.words

    def array(self, code: Code, first: int, last: int) -> tuple[Pieces, ...]:
        """The elements of `( ... )`, given without the brackets."""
        found: list[Pieces] = []
        for start, end in words_between(code.text, first, last):
            if re.match(r"\[[^\]]+\]\+?=", code.text[start:end]):
                said = code.said(start, end)
                found.append(unknown(said, "elements with an index are not read"))
            else:
                found += self.fields(code, start, end)
        return tuple(found)

    def text(self, code: Code, first: int, last: int, quotes: Quotes = "none") -> Pieces:
        """The text of an assigned value or of a here-document: it is not split."""
        builder = _TextBuilder()
        self._expand(code, first, last, builder, quotes)
        return merged(builder.pieces)

    def _expand(
        self, code: Code, at: int, last: int, builder: FieldsBuilder, quotes: Quotes
    ) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise JobFileInvalidError(f"{self._name}: its expansions are nested too deeply")
        while at < last:
            at = self._next(code, at, last, builder, quotes)
        self._depth -= 1

    def _next(self, code: Code, at: int, last: int, builder: FieldsBuilder, quotes: Quotes) -> int:
        """Expands what begins at a place, and returns the place behind it."""
        text, character = code.text, code.text[at]
        if character == "\\":
            return _escaped(code, at, last, builder, quotes)
        if character == "$":
            return self._dollar(code, at, last, builder, quotes)
        if character == "`":
            end = end_of_backticks(text, at, last)
            builder.add(_command_output(code.said(at, end)))
            return end
        if quotes in _BARE and character == "'":
            end = end_of_single_quotes(text, at, last)
            builder.add(code.pieces(at + 1, end - 1))
            return end
        if quotes in _BARE and character == '"':
            end = end_of_group(text, at, last)
            builder.open_quotes()
            self._expand(code, at + 1, end - 1, builder, "double")
            builder.close_quotes()
            return end
        if quotes == "double" and character == '"':  # within ${X:-"default"}
            return at + 1
        if quotes in _BARE and text.startswith(("<(", ">("), at):
            end = end_of_group(text, at + 1, last)
            builder.add(_command_output(code.said(at, end)))
            return end
        match = _PLAIN[quotes].match(text, at, last)
        end = at + 1 if match is None else match.end()
        pieces = code.pieces(at, end)
        if self._default_of:
            pieces = (replace(each, default_of=self._default_of) for each in pieces)
        (builder.add_split if quotes == "default" else builder.add)(pieces)
        return end

    def _dollar(
        self, code: Code, at: int, last: int, builder: FieldsBuilder, quotes: Quotes
    ) -> int:
        text = code.text
        if quotes in _BARE and text.startswith("$'", at):
            end = end_of_ansi_quotes(text, at, last)
            builder.add(unknown(code.said(at, end), "these quotes are not read"))
            return end
        if quotes in _BARE and text.startswith('$"', at):
            return at + 1
        end = end_of_expansion(text, at, last)
        if end == at:
            builder.add(code.pieces(at, at + 1))
            return at + 1
        add = builder.add_split if quotes in _BARE else builder.add
        if text.startswith("$((", at):
            add(self._arithmetic(code, at + 3, end - 2, code.said(at, end)))
        elif text.startswith("$(", at):
            add(_command_output(code.said(at, end)))
        elif text.startswith("${", at):
            self._braces(code, at + 2, end - 1, builder, quotes)
        else:
            self._add_value(text[at + 1 : end], code.said(at, end), builder, quotes)
        return end

    def _value(self, name: str, said: str) -> Value:
        """The value of a variable; of one that is not assigned, an unknown one."""
        found = self.variables.get(name)
        if found is not None:
            return found
        why = f"{name} is not set in the script"
        if not name.isidentifier():
            why = "it is an argument of the script, or depends on its run"
        return Value((unknown(said, why),))

    def _add_value(self, name: str, said: str, builder: FieldsBuilder, quotes: Quotes) -> None:
        if name in ("@", "*"):
            given = self.variables.get("@")
            if given is None:
                self.has_arguments = True
                builder.note_array(is_empty=name == "@")
            else:
                self._add_all(given, name == "*", builder, quotes)
            return
        elements = self._value(name, said).elements
        add = builder.add_split if quotes in _BARE else builder.add
        if elements:
            self.count(elements[:1])
            add(elements[0])

    def _add_all(
        self, value: Value, is_joined: bool, builder: FieldsBuilder, quotes: Quotes
    ) -> None:
        """Adds the elements of an array: `"${A[@]}"` as words, `"${A[*]}"` with blanks between."""
        self.count(value.elements)
        if not is_joined:
            builder.note_array(is_empty=not value.elements)
        for number, each in enumerate(value.elements):
            if number and (quotes == "document" or (quotes == "double" and is_joined)):
                builder.add((TextPiece(" "),))
            elif number:
                builder.end()
            (builder.add_split if quotes in _BARE else builder.add)(each)

    def _braces(
        self, code: Code, first: int, last: int, builder: FieldsBuilder, quotes: Quotes
    ) -> None:
        """Expands `${...}`, given without its brackets."""
        said = f"${{{code.said(first, last)}}}"
        match = _PARAMETER.match(code.text, first, last)
        add = builder.add_split if quotes in _BARE else builder.add
        if match is None:
            add(unknown(said, "this expansion is not read"))
            return
        mark, name, index = match["mark"], match["name"], match["index"]
        at, rest = match.end(), code.text[match.end() : last]
        if mark == "!" and not rest and index is None:
            target = self.variables.get(name)
            pointed = known_text(target.elements[0]) if target and target.elements else None
            if pointed is None or not pointed.isidentifier():
                add(unknown(said, f"the variable that {name} names is not known"))
            else:
                self._add_value(pointed, said, builder, quotes)
            return
        if mark == "!":
            add(unknown(said, "this expansion is not read"))
            return
        value = self.variables.get(name)
        if mark == "#":
            add(
                self._length(self._value(name, said), index, said)
                if not rest
                else unknown(said, "")
            )
        elif rest[:1] in ("-", "=", "+", "?") or rest[:2] in (":-", ":=", ":+", ":?"):
            operator = rest[:2] if rest.startswith(":") else rest[:1]
            at += len(operator)
            self._default(name, index, operator, (code, at, last), builder, quotes)
        elif name in ("@", "*") and not rest:
            self._add_value(name, said, builder, quotes)
        elif name in ("@", "*"):
            add(unknown(said, "this expansion is not read"))
        elif index in ("@", "*") and not rest:
            self._add_all(value or self._value(name, said), index == "*", builder, quotes)
        else:
            pieces = self._element(self._value(name, said), index, said)
            add(pieces if not rest else self._changed(pieces, code, at, last, said))

    def _element(self, value: Value, index: str | None, said: str) -> Pieces:
        if index in ("@", "*"):
            if not value.is_array and len(value.elements) == 1:
                return value.elements[0]
            return unknown(said, "expansions over all elements of an array are not read")
        number = 0
        if index is not None:
            try:
                number = evaluated(index.replace("$", ""), self._number)
            except ArithmeticUnknownError:
                return unknown(said, "the index is not a known number")
        if not -len(value.elements) <= number < len(value.elements):
            return unknown(said, "the array has no such element") if index is not None else ()
        return value.elements[number]

    def _length(self, value: Value, index: str | None, said: str) -> Pieces:
        pieces = [piece for each in value.elements for piece in each]
        if any(each.text is None or not each.is_certain for each in pieces):
            return unknown(said, why_unknown(pieces) or "it depends on a condition")
        if index in ("@", "*"):
            return (TextPiece(str(len(value.elements))),)
        return (
            TextPiece(str(sum(len(each.text or "") for each in self._element(value, index, said)))),
        )

    def _default(
        self,
        name: str,
        index: str | None,
        operator: str,
        alternative: tuple[Code, int, int],
        builder: FieldsBuilder,
        quotes: Quotes,
    ) -> None:
        """`${X:-default}` and its kin; what the script does not set is taken as unset."""
        said, inner = f"${{{name}}}", quotes
        if quotes == "none" and not isinstance(builder, _TextBuilder):
            inner = "default"
        value = self.variables.get(name)
        code, at, last = alternative
        pieces: Pieces = ()
        is_set = value is not None and value is not UNSET
        if value is not None and is_set:
            pieces = tuple(piece for each in value.elements for piece in each)
        may_be_empty = is_set and ":" in operator and not is_filled(pieces)
        if may_be_empty and pieces:
            (builder.add_split if quotes in _BARE else builder.add)(
                unknown(said_text(pieces), why_unknown(pieces))
            )
        elif is_set and not may_be_empty:
            if "+" in operator:
                self._expand(code, at, last, builder, inner)
            elif value is not None and index in ("@", "*"):
                self._add_all(value, index == "*", builder, quotes)
            else:
                self._add_value(name, said, builder, quotes)
        elif "?" in operator:
            self._add_value(name, said, builder, quotes)
        elif "+" not in operator:
            outer, self._default_of = (
                self._default_of,
                "" if is_set or value is UNSET else f"${name}",
            )
            if "=" in operator:
                self.assign(name, Value((self.text(code, at, last),)))
                self._add_value(name, said, builder, quotes)
            else:
                self._expand(code, at, last, builder, inner)
            self._default_of = outer
        elif value is None and name not in ("@", "*"):
            why = f"{name} is not set in the script"
            add = builder.add_split if quotes in _BARE else builder.add
            add(uncertain(self.text(code, at, last), why))

    def _changed(self, pieces: Pieces, code: Code, at: int, last: int, said: str) -> Pieces:
        """Substitution, removal, substring and case of a known text."""
        text = known_text(pieces)
        if text is None:
            return unknown(said, why_unknown(pieces) or "it depends on a condition")
        match = re.compile(r"//|/[#%]?|##?|%%?|\^\^?|,,?|:").match(code.text, at, last)
        operator = "" if match is None else match[0]
        argument = known_text(self.text(code, at + len(operator), last))
        changed: str | None = None
        if argument is not None:
            if operator in ("/", "//"):
                changed = _substituted(text, argument, operator == "//")
            elif operator in ("#", "##", "%", "%%"):
                return _without_match(pieces, text, argument, operator, said)
            elif operator and operator in "^^,," and not argument:
                change = str.upper if "^" in operator else str.lower
                changed = change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
            elif operator == ":":
                changed = self._substring(text, argument)
        if changed is None:
            return unknown(said, "this expansion is not read")
        return pieces if changed == text else (TextPiece(changed),)

    def _substring(self, text: str, argument: str) -> str | None:
        numbers: list[int] = []
        for each in argument.split(":"):
            try:
                numbers.append(evaluated(each, self._number))
            except ArithmeticUnknownError:
                return None
        first, length = numbers[0], numbers[1] if len(numbers) == 2 else len(text)
        first = first + len(text) if first < 0 else first
        if len(numbers) > 2 or first < 0 or length < 0:
            return None
        return text[first : first + length]

    def _arithmetic(self, code: Code, first: int, last: int, said: str) -> Pieces:
        expanded = self.text(code, first, last, "double")
        expression = known_text(expanded)
        if expression is None:
            return unknown(said, why_unknown(expanded) or "it depends on a condition")
        try:
            return (TextPiece(str(evaluated(expression, self._number))),)
        except ArithmeticUnknownError:
            return unknown(said, "it is not arithmetic over known whole numbers")

    def number(self, code: Code, first: int, last: int) -> int | None:
        """The value of an arithmetic expression; None: it is not known."""
        text = known_text(self._arithmetic(code, first, last, ""))
        return None if text is None else int(text)

    def _number(self, name: str) -> int:
        value = self.variables.get(name)
        text = known_text(value.elements[0]) if value is not None and value.elements else None
        if text is None or not re.fullmatch(r"\s*-?(0|[1-9][0-9]{0,17})\s*", text):
            raise ArithmeticUnknownError
        return int(text)


class _TextBuilder(FieldsBuilder):
    """Collects a text that is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[TextPiece] = []

    def add(self, pieces: Iterable[TextPiece]) -> None:
        self.pieces += pieces

    def add_split(self, pieces: Iterable[TextPiece]) -> None:
        self.pieces += pieces

    def end(self) -> None:
        """Between the elements of an array."""
        self.pieces.append(TextPiece(" "))


def _escaped(code: Code, at: int, last: int, builder: FieldsBuilder, quotes: Quotes) -> int:
    if is_continuation(code.text, at):
        return code.text.index("\n", at) + 1
    follows = code.text[at + 1 : at + 2]
    if quotes not in _BARE and follows not in _ESCAPED[quotes]:
        builder.add(code.pieces(at, at + 1))
        return at + 1
    builder.add(code.pieces(at + 1, min(at + 2, last)))
    return at + 2


def _command_output(said: str) -> Pieces:
    return unknown(said, "it is the output of a command, and nothing is executed")


def _substituted(text: str, argument: str, is_everywhere: bool) -> str | None:
    pattern, _, replacement = argument.partition("/")
    if not pattern or re.search(r"[*?\[\]\\#%&]", pattern + replacement):
        return None
    return text.replace(pattern, replacement, -1 if is_everywhere else 1)


def _without_match(pieces: Pieces, text: str, pattern: str, operator: str, said: str) -> Pieces:
    """`${X#pattern}` and `${X%pattern}`: the text without the shortest or longest match."""
    if len(text) > _MAX_PATTERN or "\\" in pattern or "[" in pattern:
        return unknown(said, "this expansion is not read")
    lengths = range(len(text) + 1)
    if len(operator) == 2:
        lengths = range(len(text), -1, -1)
    for length in lengths:
        if operator[0] == "#" and fnmatchcase(text[:length], pattern):
            first, last = length, len(text)
        elif operator[0] == "%" and fnmatchcase(text[len(text) - length :], pattern):
            first, last = 0, len(text) - length
        else:
            continue
        if len(pieces) == 1:
            return (pieces[0].part(first, last),)
        return (TextPiece(text[first:last]),)
    return pieces
