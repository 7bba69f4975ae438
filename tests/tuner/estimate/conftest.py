"""What tests of estimates and plans start from."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_constants_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory in which measured constants are looked for."""
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"
