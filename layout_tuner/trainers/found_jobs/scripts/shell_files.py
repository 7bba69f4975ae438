"""Files that a shell script writes: `cat > FILE <<EOF`, `echo TEXT > FILE`, `tee FILE`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layout_tuner.trainers.found_jobs.scripts.shell_state import ScriptState
from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    Pieces,
    TextPiece,
    file_text,
    merged,
    said_text,
    spaced,
    unknown,
)

if TYPE_CHECKING:
    from tree_sitter import Node


@dataclass(frozen=True)
class Redirects:
    """Where a command's output goes, and the text that it is given."""

    path: str | None = None
    is_append: bool = False
    document: Pieces | None = None


class ScriptFiles(ScriptState):
    """A script's state with the files that its commands write."""

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
