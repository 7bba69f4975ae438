"""A real probe beside other busy processes, from its ranks to the page of the leaderboard.

The fast suite has both halves of the way: the ranks in tests/workers/trainer/test_disturbance.py,
the pages in tests/api/routes/test_disturbed_trials.py.
"""

from __future__ import annotations

import os

import pytest

from search_spaces.statistics.disturbance import DISTURBED_SHARE
from tests.e2e.conftest import Service
from tests.workers.busy_cores import busy

pytestmark = [pytest.mark.nightly, pytest.mark.ranks, pytest.mark.timeout(200)]


def test_a_probe_beside_busy_processes_is_marked_on_the_leaderboard(service: Service) -> None:
    with busy(os.sched_getaffinity(0), 2):
        campaign = service.submit(budget={"trials": 1}, stop={"remeasure": 0})["id"]
        (trial,) = service.wait_for_completed(campaign, 1)
    assert trial["measurement"]["others_share"] > DISTURBED_SHARE
    root = str(service.http.base_url).removesuffix("/v1/")
    page = service.http.get(f"{root}/campaigns/e2e", headers={"Accept": "text/html"})
    assert '<span class="mark">disturbed</span>' in page.text
    shown = service.run("trial", "show", "e2e/1").stdout
    assert "of a device's time, disturbed" in shown
