from __future__ import annotations

import pytest

from tests.kit.api import Api


@pytest.mark.parametrize("written", ["2026", "0.5", "1767225600"])
def test_a_bare_number_is_not_a_time(api: Api, written: str) -> None:
    problem = api.get("/audit", status=422, until=written)
    assert "2026-01-31T12:00:00Z" in problem["detail"]


def test_a_time_with_a_zone_is_read(api: Api) -> None:
    assert api.get("/audit", until="2026-01-31T12:00:00+01:00")["entries"] == []
