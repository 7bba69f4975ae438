"""The service of the worker that a test runs, and its client."""

from __future__ import annotations

from tests.workers.worker.conftest import client, service

__all__ = ["client", "service"]
