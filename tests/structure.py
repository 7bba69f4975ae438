"""Checks sizes and names, so that the code stays easy to navigate; part of `make check`.

Run as `python -m tests.structure`. It prints one line for each finding and exits with 1 if there is
any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

MODULES_OF_FOLDER: Final = {
    "layout_tuner": 20,
    "search_spaces": 20,
    "results_db": 20,
    "tuner": 20,
    "workers": 20,
    "api": 20,
    "tests": 30,
    "benchmarks": 30,
}
"""Most modules that one folder of a top-level folder may hold, `__init__.py` not counted."""

PRODUCT: Final = ("layout_tuner", "search_spaces", "results_db", "tuner", "workers", "api")
UNIQUE_CLASSES: Final = (*PRODUCT, "benchmarks")
"""Folders over which the name of a class has one meaning."""

CAMPAIGN_READER: Final = "search_spaces/campaigns/stored_campaign.py"
"""The module that knows the fields of a campaign's stored document."""
OPENS_CAMPAIGNS: Final = {
    "api/dashboard/campaign_form.py": "the form shows and changes a document field by field",
}
"""Other modules that look into one, and why."""

MIGRATIONS: Final = "results_db/migrations/versions"
MODULE_LINES: Final = 600
SUBJECT_LENGTH: Final = 72
FIRST_CHECKED_COMMIT: Final = "07d6ce8"
"""Commits after this one have their subjects checked."""


def main() -> None:
    findings = [
        *crowded_folders(),
        *long_modules(),
        *ambiguous_classes(),
        *lost_decisions(),
        *opened_campaigns(),
        *long_subjects(),
    ]
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    if findings:
        sys.exit(1)
    sys.stdout.write(
        "structure: folders, modules, class names, decisions, documents and commit subjects are fine\n"
    )


def modules(*folders: str) -> Iterator[Path]:
    """The Python modules below some top-level folders, as paths relative to the root."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT)


def crowded_folders() -> Iterator[str]:
    counts = Counter(
        path.parent
        for path in modules(*MODULES_OF_FOLDER)
        if path.name != "__init__.py" and path.parent.as_posix() != MIGRATIONS
    )
    for folder, count in sorted(counts.items()):
        most = MODULES_OF_FOLDER[folder.parts[0]]
        if count > most:
            yield f"{folder}/ holds {count} modules, more than {most}: divide it by meaning"


def long_modules() -> Iterator[str]:
    for path in modules(*MODULES_OF_FOLDER):
        lines = len((ROOT / path).read_text().splitlines())
        if lines > MODULE_LINES and path.parent.as_posix() != MIGRATIONS:
            yield f"{path} has {lines} lines, more than {MODULE_LINES}: divide it by meaning"


def ambiguous_classes() -> Iterator[str]:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules(*UNIQUE_CLASSES):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{path}:{node.lineno}")
    for name, places in sorted(homes.items()):
        if len(places) > 1:
            yield f"the class name {name} has several meanings: {', '.join(places)}"


def lost_decisions() -> Iterator[str]:
    """Comments that name a decision without a page."""
    pages = {int(page.name[:4]) for page in (ROOT / "docs/decisions").glob("0*.md")}
    for path in modules(*MODULES_OF_FOLDER):
        for number in re.findall(r"[Dd]ecision\s+(\d+)", (ROOT / path).read_text()):
            if int(number) not in pages:
                yield f"{path}: decision {number} has no page in docs/decisions"


def opened_campaigns() -> Iterator[str]:
    """Places where a module looks into a campaign's document in place of its reader."""
    advice = f"read it through {CAMPAIGN_READER}"
    for path in modules(*PRODUCT):
        if path.as_posix() not in (CAMPAIGN_READER, *OPENS_CAMPAIGNS):
            for line in document_reads((ROOT / path).read_text()):
                yield f"{path}:{line} looks into a campaign's document: {advice}"
    for path in sorted((ROOT / "api/html/templates").glob("*.html")):
        if re.search(r"\.(spec|stored\.document|stored\.fields)(\[|\.get\()", path.read_text()):
            yield f"{path.relative_to(ROOT)} looks into a campaign's document: {advice}"


def document_reads(source: str) -> list[int]:
    """Lines that take a field of a campaign's document by its name, or read it as a whole.

    A document is what is called `spec`, an attribute of that name, what a stored campaign shows,
    and a name that is bound to one of these in the same module.
    """
    tree = ast.parse(source)
    names = {"spec"}

    def is_document(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            return node.func.id == "dict" and is_document(node.args[0])
        if isinstance(node, ast.NamedExpr):
            return is_document(node.value)
        if isinstance(node, ast.Name):
            return node.id in names
        return isinstance(node, ast.Attribute) and (
            node.attr == "spec"
            or (node.attr in ("document", "fields") and ast.unparse(node.value).endswith("stored"))
        )

    bound = [
        (target, node.value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names.update(
        target.id for target, value in bound if isinstance(target, ast.Name) and is_document(value)
    )
    return [node.lineno for node in ast.walk(tree) if _reads(node, is_document)]


def _reads(node: ast.AST, is_document: Callable[[ast.AST], bool]) -> bool:
    if isinstance(node, ast.Subscript):
        return _is_text(node.slice) and is_document(node.value)
    if isinstance(node, ast.Compare):
        return _is_text(node.left) and any(map(is_document, node.comparators))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    method, first = node.func, node.args[0]
    if method.attr in ("get", "pop", "setdefault"):
        return _is_text(first) and is_document(method.value)
    is_whole = isinstance(first, ast.Attribute) and is_document(first)
    return method.attr == "from_mapping" and is_whole


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def long_subjects() -> Iterator[str]:
    """Subjects of new commits; nothing where git, or the first checked commit, is not there."""
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h %s", f"{FIRST_CHECKED_COMMIT}..HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in log.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT_LENGTH:
            yield f"the subject of {commit} has {len(subject)} characters, over {SUBJECT_LENGTH}"


if __name__ == "__main__":
    main()
