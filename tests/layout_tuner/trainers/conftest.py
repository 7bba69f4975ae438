"""What these tests need of a service."""

from __future__ import annotations

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
