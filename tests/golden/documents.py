"""The golden documents by name; run as a module it writes the files that they are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tests.golden import structure
from tests.kit.python_process import printed_by

EXPECTED: Final = Path(__file__).parent / "expected"
REWRITE: Final = "python -m tests.golden.documents"


def commands() -> list[str]:
    """Makes the document of the commands in a process of its own.

    click's commands keep the option --help with the names of the first context that asked for it,
    and another test may have been the first.
    """
    imports = "import json; from tests.golden import structure"
    return json.loads(printed_by(f"{imports}; print(json.dumps(structure.commands()))"))


DOCUMENTS: Final[dict[str, Callable[[], list[str]]]] = {
    "structure/commands": commands,
    "structure/api": structure.api,
    "structure/sqlite_tables": structure.sqlite_tables,
    "structure/postgresql_tables": structure.postgresql_tables,
    **{
        f"structure/{name}": partial(structure.of_service, name)
        for name in ("exit_codes", "protocol", "events", "exports", "tables", "metrics", "problems")
    },
    "prose/refusals": partial(structure.of_service, "refusals"),
    "prose/exports": structure.prose_of_exports,
}


def file_of(name: str) -> Path:
    """Where a document is kept."""
    return EXPECTED / f"{name}.txt"


def text_of(name: str) -> str:
    """A document as the product has it now."""
    return "".join(f"{line.rstrip()}\n" for line in DOCUMENTS[name]())


def write() -> None:
    """Rewrites every golden file."""
    for name in DOCUMENTS:
        file_of(name).parent.mkdir(parents=True, exist_ok=True)
        file_of(name).write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    write()
