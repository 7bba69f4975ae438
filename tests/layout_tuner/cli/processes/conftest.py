"""What tests of these commands share with those of the workers."""

from __future__ import annotations

from tests.workers.conftest import mark

__all__ = ["mark"]
