"""Reading the documentation: its prose, links, headings and console blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

NOT_RUN: Final = re.compile(r"<!-- not run: (.+) -->")
"""The line before a console block whose commands the test of documented commands leaves out."""

_COMMAND: Final = re.compile(r"(?P<host>[a-z]\w*)?\$ (?P<command>.+)")
_PUNCTUATION: Final = ";&|"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsoleBlock:
    """A fenced block of commands and what they print."""

    line: int
    """Number of its first line, from 1."""
    commands: tuple[str, ...]
    """The commands, with their continuation lines."""
    why_not_run: str | None
    """Why its commands are not run; None: they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Markdown:
    """A Markdown file."""

    path: Path
    lines: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Markdown:
        return cls(path=path, lines=tuple(path.read_text().splitlines()))

    @property
    def name(self) -> str:
        """Its path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    def prose(self) -> Iterator[tuple[int, str]]:
        """Numbers and texts of the lines outside of fenced blocks."""
        fenced = False
        for number, line in enumerate(self.lines, start=1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, line

    def links(self) -> Iterator[str]:
        """The targets of its links."""
        prose = "\n".join(line for _, line in self.prose())
        for match in re.finditer(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "code", prose)):
            yield match[1]

    def anchors(self) -> set[str]:
        """The names by which links reach its headings."""
        found: dict[str, int] = {}
        names = set()
        for _, line in self.prose():
            if heading := re.fullmatch(r"#{1,6} (.+)", line):
                anchor = _anchor(heading[1])
                count = found.get(anchor, 0)
                found[anchor] = count + 1
                names.add(f"{anchor}-{count}" if count else anchor)
        return names

    def console_blocks(self) -> Iterator[ConsoleBlock]:
        """Its blocks of commands, in order."""
        why_not_run: str | None = None
        block: list[str] | None = None
        begun = 0
        for number, line in enumerate(self.lines, start=1):
            text = line.strip()
            if block is not None and text == "```":
                yield ConsoleBlock(
                    line=begun, commands=tuple(_commands(block)), why_not_run=why_not_run
                )
                block, why_not_run = None, None
            elif block is not None:
                block.append(text)
            elif text == "```console":
                block, begun = [], number
            elif text:
                marker = NOT_RUN.fullmatch(text)
                why_not_run = marker[1] if marker else None

    def run_commands(self) -> list[str]:
        """The commands that can be run where there is nothing but this machine."""
        blocks = (block for block in self.console_blocks() if block.why_not_run is None)
        return [command for block in blocks for command in block.commands]


def documents() -> list[Markdown]:
    """Every Markdown file of the repository."""
    return [
        Markdown.read(path)
        for path in sorted(ROOT.rglob("*.md"))
        if not any(
            part.startswith(".") or part in ("build", "node_modules")
            for part in path.relative_to(ROOT).parts[:-1]
        )
    ]


def guides() -> list[Markdown]:
    """The documents whose commands are run in order: README, tutorial and guides."""
    guided = sorted((ROOT / "docs" / "guides").glob("*.md"))
    return [
        Markdown.read(path) for path in (ROOT / "README.md", ROOT / "docs/tutorial.md", *guided)
    ]


def words(command: str) -> list[list[str]]:
    """The words of a command, in a list for each program that it starts; redirections stay in."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    programs: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(_PUNCTUATION):
            programs.append([])
        else:
            programs[-1].append(word)
    return [program for program in programs if program]


def _commands(block: list[str]) -> Iterator[str]:
    lines = iter(block)
    for line in lines:
        if match := _COMMAND.match(line):
            command = match["command"]
            while command.endswith("\\"):
                command = f"{command[:-1].rstrip()} {next(lines)}"
            yield command


def _anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.lower())
    return text.replace(" ", "-")
