"""This version of the program and a next one, whose schema has one more migration."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from layout_tuner.results_db.migrations import migrate

PACKAGED: Final = (migrate.SCRIPTS / "versions",)
WITH_NEXT: Final = (*PACKAGED, Path(__file__).with_name("next_schema"))
"""Folders of migrations as the next version has them."""

THIS, NEXT = migrate.revisions(WITH_NEXT)[-2:]


def become_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here to the end of the test the program is the next version."""
    monkeypatch.setattr(migrate, "VERSIONS", WITH_NEXT)


def become_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here to the end of the test the program is this version again."""
    monkeypatch.setattr(migrate, "VERSIONS", PACKAGED)
