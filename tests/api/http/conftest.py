from __future__ import annotations

import pytest


@pytest.fixture
def served_url(sqlite_url: str) -> str:
    """No SQL dialect changes how requests are read, limited and answered."""
    return sqlite_url
