"""Outcomes that waited for the service are posted before it is asked for trials again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.fake_service import TOKEN, FakeService
from tests.workers.worker.test_outcome_spool import make_report
from workers.errors import ServiceUnreachableError
from workers.service.lease_client import LeaseClient
from workers.worker.outcome_posting import Outbox, Posting
from workers.worker.outcome_spool import Spool

PATIENCE_S = 30.0


@pytest.fixture
def posting(service: FakeService, tmp_path: Path) -> Iterator[Posting]:
    with LeaseClient(service.url, TOKEN) as client, Spool(tmp_path / "spool") as spool:
        posting = Posting(Outbox(client, spool))
        yield posting
        posting.close(PATIENCE_S)


def posted(service: FakeService) -> list[int]:
    return [outcome["trial_id"] for outcome in service.outcomes]


def test_nothing_waits_for_a_service_that_is_there(posting: Posting, service: FakeService) -> None:
    posting.catch_up(PATIENCE_S)
    posting.take(make_report(1))
    posting.catch_up(PATIENCE_S)
    assert posted(service) == [1]


def test_what_a_service_that_is_away_was_not_told_is_still_owed(
    posting: Posting, service: FakeService
) -> None:
    posting.catch_up(PATIENCE_S)
    service.away = True
    posting.take(make_report(1))
    with pytest.raises(ServiceUnreachableError, match="outcomes wait"):
        posting.catch_up(0.05)
    service.away = False
    posting.catch_up(PATIENCE_S)
    assert posted(service) == [1]


def test_whoever_waits_for_the_outcomes_ends_the_pause_between_two_tries(
    posting: Posting, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"workers.service.http.{limit}", 3600.0)
    posting.take(make_report(2))
    posting.catch_up(PATIENCE_S)  # from here on its pauses are the long ones
    service.away = True
    posting.take(make_report(1))
    with pytest.raises(ServiceUnreachableError):
        posting.catch_up(0.5)
    service.away = False
    deadline = time.monotonic() + PATIENCE_S
    while 1 not in posted(service) and time.monotonic() < deadline:
        try:
            posting.catch_up(1.0)
        except ServiceUnreachableError:
            continue
    assert posted(service) == [2, 1]


def test_an_outcome_that_the_service_breaks_down_over_holds_up_nobody(
    posting: Posting, service: FakeService
) -> None:
    service.breaks_over = {1}
    posting.take(make_report(1))
    posting.catch_up(PATIENCE_S)
    assert posted(service) == []


def test_a_token_that_is_refused_holds_up_nobody_who_would_hear_the_same(
    service: FakeService, tmp_path: Path
) -> None:
    with LeaseClient(service.url, "another") as client, Spool(tmp_path / "spool") as spool:
        posting = Posting(Outbox(client, spool))
        posting.take(make_report(1))
        posting.catch_up(PATIENCE_S)
        posting.close(PATIENCE_S)
