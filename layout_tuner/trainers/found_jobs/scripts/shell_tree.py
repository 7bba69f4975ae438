"""What tree-sitter's tree of a shell script says of branches and assignments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

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
