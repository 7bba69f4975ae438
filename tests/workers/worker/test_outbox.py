"""Outcomes are posted until they are taken; one that can't be does not hold up the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.fake_service import TOKEN, FakeService
from tests.workers.worker.test_outcome_spool import make_report
from workers.errors import ServiceUnreachableError
from workers.service.lease_client import LeaseClient
from workers.worker.outcome_posting import Outbox
from workers.worker.outcome_spool import Spool


@pytest.fixture
def client(service: FakeService) -> Iterator[LeaseClient]:
    with LeaseClient(service.url, TOKEN) as client:
        yield client


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path / "spool") as spool:
        yield spool


def posted(service: FakeService) -> list[int]:
    return [outcome["trial_id"] for outcome in service.outcomes]


def test_an_outcome_that_always_breaks_the_service_is_set_aside_in_the_end(
    service: FakeService, client: LeaseClient, spool: Spool, tmp_path: Path
) -> None:
    service.breaks_over = {1}
    clock = [0.0]
    outbox = Outbox(client, spool, now=lambda: clock[0])
    outbox.keep(make_report(1))
    aside = tmp_path / "spool" / "rejected" / "trial-1-attempt-2.json"
    while not aside.exists():
        outbox.post()
        clock[0] += 1
        assert clock[0] < 3600
    assert clock[0] > 600
    assert spool.kept() == []


def test_an_outcome_is_not_posted_again_at_once(
    service: FakeService, client: LeaseClient, spool: Spool
) -> None:
    service.breaks_over = {1}
    clock = [0.0]
    outbox = Outbox(client, spool, now=lambda: clock[0])
    outbox.keep(make_report(1))
    outbox.post()
    service.breaks_over = set()
    outbox.post()
    assert posted(service) == []
    clock[0] = 1.0
    outbox.post()
    assert posted(service) == [1]


def test_a_service_that_is_away_costs_no_try(
    service: FakeService, client: LeaseClient, spool: Spool
) -> None:
    service.away = True
    outbox = Outbox(client, spool, now=lambda: 0.0)
    outbox.keep(make_report(1))
    for _ in range(30):
        with pytest.raises(ServiceUnreachableError):
            outbox.post()
    service.away = False
    outbox.post()
    assert posted(service) == [1]


def test_a_directory_that_is_lost_is_said_and_memory_does(
    service: FakeService,
    client: LeaseClient,
    spool: Spool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    outbox = Outbox(client, spool)
    (tmp_path / "spool").rename(tmp_path / "elsewhere")
    service.breaks_over = {1}
    outbox.keep(make_report(1))
    outbox.keep(make_report(2))
    outbox.post()
    outbox.post()
    assert posted(service) == [2]
    said = [record.getMessage() for record in caplog.records]
    assert sum("the outcome can't be written" in line for line in said) == 2
    outbox.close()
    assert "the outcome of trial id 1 is lost" in caplog.records[-1].getMessage()


def test_what_an_earlier_process_left_is_posted(
    service: FakeService, client: LeaseClient, spool: Spool
) -> None:
    Outbox(client, spool).keep(make_report(1))
    Outbox(client, spool).post()
    assert posted(service) == [1]
    assert spool.kept() == []


def test_a_refused_outcome_that_could_not_be_written_is_set_aside_once_the_disk_works(
    service: FakeService, client: LeaseClient, spool: Spool, tmp_path: Path
) -> None:
    outbox = Outbox(client, spool)
    (tmp_path / "spool").rename(tmp_path / "elsewhere")
    outbox.keep(make_report(1))
    (tmp_path / "elsewhere").rename(tmp_path / "spool")
    service.refuse_outcomes = True
    outbox.post()
    assert [path.name for path in (tmp_path / "spool" / "rejected").iterdir()] == [
        "trial-1-attempt-2.json"
    ]


def test_an_outcome_that_can_not_be_removed_is_posted_once(
    service: FakeService,
    client: LeaseClient,
    spool: Spool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError("read-only file system")

    outbox = Outbox(client, spool)
    outbox.keep(make_report(1))
    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.ERROR):
        outbox.post()
        outbox.post()
    assert posted(service) == [1]
    assert "read-only file system" in caplog.text
