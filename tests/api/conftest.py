"""What tests of the service start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.service_fixtures import (
    api,
    client,
    command,
    data_dir,
    http,
    lasting,
    module_api,
    served_url,
    service,
    settings,
    shared,
    store,
    tls,
)

__all__ = [
    "api",
    "client",
    "command",
    "data_dir",
    "http",
    "lasting",
    "module_api",
    "served_url",
    "service",
    "settings",
    "shared",
    "store",
    "tls",
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares the fast suite the seconds in which the cases of every route are made."""
    is_slow = collection_path.name == "test_any_request.py"
    return True if is_slow and "not slow" in config.option.markexpr else None
