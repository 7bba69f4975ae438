"""Test ranks whose program takes longer to import than their group may take."""

from __future__ import annotations

import time

from tests.workers.rank_programs import run

__all__ = ["run"]

time.sleep(2.0)
