"""What tests of the client need of a service: an empty database that it opens."""

from __future__ import annotations

from tests.kit.service_fixtures import data_dir, service, store

__all__ = ["data_dir", "service", "store"]
