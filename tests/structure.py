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
from collections.abc import Iterator
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
        *long_subjects(),
    ]
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    if findings:
        sys.exit(1)
    sys.stdout.write(
        "structure: folders, modules, class names, decisions and commit subjects are fine\n"
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
