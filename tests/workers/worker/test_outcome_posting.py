"""Outcomes are posted until they are taken, before more trials are asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.worker_loop import WorkedService, make_report
from workers.errors import ServiceUnreachableError
from workers.service.lease_client import LeaseClient
from workers.worker.outcome_posting import Outbox, Posting
from workers.worker.outcome_spool import Spool

PATIENCE_S = 30.0


@pytest.fixture
def spool(service: WorkedService) -> Iterator[Spool]:
    with Spool(service.spool_dir) as spool:
        yield spool


@pytest.fixture
def clock() -> list[float]:
    """The time that the outbox sees."""
    return [0.0]


@pytest.fixture
def outbox(client: LeaseClient, spool: Spool, clock: list[float]) -> Outbox:
    return Outbox(client, spool, now=lambda: clock[0])


@pytest.fixture
def posting(client: LeaseClient, spool: Spool) -> Iterator[Posting]:
    posting = Posting(Outbox(client, spool))
    yield posting
    posting.close(PATIENCE_S)


def test_an_outcome_that_always_breaks_the_service_is_set_aside_in_the_end(
    service: WorkedService, outbox: Outbox, clock: list[float]
) -> None:
    service.breaks_over = {1}
    outbox.keep(make_report(1))
    while not (service.spool_dir / "rejected" / "trial-1-attempt-2.json").exists():
        outbox.post()
        clock[0] += 1
        assert clock[0] < 3600
    assert clock[0] > 600
    assert not service.kept()


def test_an_outcome_is_not_posted_again_at_once(
    service: WorkedService, outbox: Outbox, clock: list[float]
) -> None:
    service.breaks_over = {1}
    outbox.keep(make_report(1))
    outbox.post()
    service.breaks_over = set()
    outbox.post()
    assert not service.outcomes
    clock[0] = 1.0
    outbox.post()
    assert list(service.posted()) == [1]


def test_a_service_that_is_away_costs_no_try(service: WorkedService, outbox: Outbox) -> None:
    service.away = True
    outbox.keep(make_report(1))
    for _ in range(30):
        with pytest.raises(ServiceUnreachableError):
            outbox.post()
    service.away = False
    outbox.post()
    assert list(service.posted()) == [1]


def test_a_directory_that_is_lost_is_said_and_memory_does(
    service: WorkedService, outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.spool_dir.rename(tmp_path / "elsewhere")
    service.breaks_over = {1}
    outbox.keep(make_report(1))
    outbox.keep(make_report(2))
    outbox.post()
    outbox.post()
    assert list(service.posted()) == [2]
    said = [record.getMessage() for record in caplog.records]
    assert sum("the outcome can't be written" in line for line in said) == 2
    outbox.close()
    assert "the outcome of trial id 1 is lost" in caplog.records[-1].getMessage()


def test_a_refused_outcome_that_could_not_be_written_is_set_aside_once_the_disk_works(
    service: WorkedService, outbox: Outbox, tmp_path: Path
) -> None:
    service.spool_dir.rename(tmp_path / "elsewhere")
    outbox.keep(make_report(1))
    (tmp_path / "elsewhere").rename(service.spool_dir)
    service.refuse_outcomes = True
    outbox.post()
    aside = [path.name for path in (service.spool_dir / "rejected").iterdir()]
    assert aside == ["trial-1-attempt-2.json"]


def test_an_outcome_that_can_not_be_removed_is_posted_once(
    service: WorkedService,
    outbox: Outbox,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError("read-only file system")

    outbox.keep(make_report(1))
    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.ERROR):
        outbox.post()
        outbox.post()
    assert [outcome["trial_id"] for outcome in service.outcomes] == [1]
    assert "read-only file system" in caplog.text


def test_what_an_absent_service_missed_is_owed(posting: Posting, service: WorkedService) -> None:
    posting.catch_up(PATIENCE_S)
    service.away = True
    posting.take(make_report(1))
    with pytest.raises(ServiceUnreachableError, match="outcomes wait"):
        posting.catch_up(0.05)
    service.away = False
    posting.catch_up(PATIENCE_S)
    assert list(service.posted()) == [1]


def test_whoever_waits_for_the_outcomes_ends_the_pause_between_two_tries(
    posting: Posting, service: WorkedService, monkeypatch: pytest.MonkeyPatch
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
    while 1 not in service.posted() and time.monotonic() < deadline:
        try:
            posting.catch_up(1.0)
        except ServiceUnreachableError:
            continue
    assert list(service.posted()) == [2, 1]


def test_what_breaks_the_service_holds_up_nobody(posting: Posting, service: WorkedService) -> None:
    service.breaks_over = {1}
    posting.take(make_report(1))
    posting.catch_up(PATIENCE_S)
    assert not service.outcomes


def test_a_refused_token_holds_up_nobody_by_itself(service: WorkedService, spool: Spool) -> None:
    with LeaseClient(service.url, "another") as client:
        posting = Posting(Outbox(client, spool))
        posting.take(make_report(1))
        posting.catch_up(PATIENCE_S)
        posting.close(PATIENCE_S)
