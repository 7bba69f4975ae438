"""What tests of options share with those of the workers."""

from __future__ import annotations

from tests.workers.conftest import service

__all__ = ["service"]
