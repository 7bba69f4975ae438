"""Outcomes are on disk until they are taken, and posted before more trials are asked for."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from layout_tuner.protocol.worker_messages import OutcomeReport
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.timing_mark import TIMING_VARIABLE, timing
from layout_tuner.workers.errors import ServiceUnreachableError, SpoolInUseError, SpoolUnusableError
from layout_tuner.workers.service.lease_client import EncodedOutcome, LeaseClient
from layout_tuner.workers.worker import outcome_posting
from layout_tuner.workers.worker.outcome_posting import Outbox, Posting
from layout_tuner.workers.worker.outcome_spool import Spool, adopt_abandoned
from tests.kit.fake_service import TOKEN, problem
from tests.kit.store import completed, failed
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import WorkedService, make_report

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


def test_an_outcome_is_not_posted_again_at_once_and_a_service_that_is_away_costs_no_try(
    service: WorkedService, outbox: Outbox, clock: list[float]
) -> None:
    service.away = True
    outbox.keep(make_report(1))
    for _ in range(30):
        with pytest.raises(ServiceUnreachableError):
            outbox.post()
    service.away, service.breaks_over = False, {1}
    outbox.post()
    service.breaks_over = set()
    outbox.post()
    assert not service.outcomes
    clock[0] = 1.0
    outbox.post()
    assert list(service.posted()) == [1]


def test_outcomes_stay_in_memory_where_the_directory_for_them_is_lost(
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


def test_outcomes_wait_for_timed_iterations_but_not_in_the_way_of_leases(
    service: WorkedService, posting: Posting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMING_VARIABLE, str(tmp_path / "timing"))
    monkeypatch.setattr(outcome_posting, "_LATER_WHILE_TIMING_S", 3600.0)
    posting.catch_up(PATIENCE_S)
    wait_until("its thread has looked", lambda: not posting._hurried.is_set())
    with timing():
        posting.take(make_report(1))
        wait_until("the outcome is on disk", service.kept)
        assert not service.outcomes
    wait_until("the first outcome is posted", lambda: list(service.posted()) == [1])
    with timing():
        posting.take(make_report(2))
        posting.catch_up(PATIENCE_S)
        assert list(service.posted()) == [1, 2]


def set_aside(service: WorkedService) -> dict[str, Any]:
    """The states of the outcomes that were set aside, by the names of their files."""
    return {
        path.name: json.loads(path.read_bytes())["outcome"]["state"]
        for path in (service.spool_dir / "rejected").iterdir()
    }


def has_measurement(body: dict[str, Any]) -> bool:
    return body["outcome"]["measurement"] is not None


MEASURED: Final = OutcomeReport(
    trial_id=1,
    attempt=2,
    worker_id="w",
    outcome=completed(Layout()),
    nodes_held=0.5,
    iterations_s=3.0,
)


def test_the_service_is_told_what_it_refused(service: WorkedService, outbox: Outbox) -> None:
    service.refuses = has_measurement
    outbox.keep(MEASURED)
    assert not outbox.post()
    (told,) = service.outcomes
    outcome = told["outcome"]
    assert (outcome["state"], outcome["reason"]) == ("failed", "implausible")
    assert outcome["message"] == "the service refused the measurement: a number is not finite"
    assert (outcome["duration_s"], told["nodes_held"], told["iterations_s"]) == (4.0, 0.5, 3.0)
    assert outcome["log_tail"] == "the last line\n"
    assert set_aside(service) == {"trial-1-attempt-2.json": "completed"}
    assert not service.kept()


@pytest.mark.parametrize("state", ["infeasible", "cancelled"])
def test_refused_figures_of_another_outcome_are_left_out(
    service: WorkedService, outbox: Outbox, state: str
) -> None:
    service.refuses = lambda body: bool(body["outcome"]["duration_s"] or body["nodes_held"])
    reason = {"infeasible": "out_of_memory"}.get(state, state)
    outbox.keep(replace(MEASURED, outcome=failed(reason)))
    outbox.post()
    (told,) = service.outcomes
    outcome = told["outcome"]
    assert (outcome["state"], outcome["reason"], outcome["node"]) == (state, reason, "node-1")
    assert outcome["message"].startswith(f"rank 1 of 2: {reason}; the service refused the figures")
    assert set_aside(service) == {"trial-1-attempt-2.json": state}


def test_an_outcome_refused_again_is_told_with_less(service: WorkedService, outbox: Outbox) -> None:
    service.refuse_outcomes = True
    outbox.keep(MEASURED)
    assert not outbox.post()
    names = ("trial-1-attempt-2", "trial-1-attempt-2-again", "trial-1-attempt-2-again-again")
    states = ("completed", "failed", "failed")
    assert set_aside(service) == {f"{a}.json": b for a, b in zip(names, states, strict=True)}
    assert not service.kept()


def test_a_refusal_because_the_lease_is_gone_is_no_result_of_the_layout(
    service: WorkedService, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "answer", lambda *_: (409, problem("another worker leased it")))
    outbox.keep(MEASURED)
    outbox.post()
    assert set_aside(service) == {"trial-1-attempt-2.json": "completed"}
    assert not service.kept()


def test_a_crash_before_the_refusal_is_on_disk_leaves_the_measurement_to_be_posted_again(
    service: WorkedService, client: LeaseClient, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    service.refuses = has_measurement
    outbox = Outbox(client, spool)
    outbox.keep(MEASURED)
    with monkeypatch.context() as patched:
        patched.setattr(spool, "keep", crash)
        with pytest.raises(KeyboardInterrupt):
            outbox.post()
    Outbox(client, spool).post()
    assert service.posted()[1]["reason"] == "implausible"
    assert set(set_aside(service).values()) == {"completed"}
    assert not service.kept()


def test_a_crash_before_the_refusal_is_told_leaves_it_to_be_told(
    service: WorkedService, client: LeaseClient, spool: Spool
) -> None:
    def refuse_and_go_away(body: dict[str, Any]) -> bool:
        service.away = has_measurement(body)
        return service.away

    service.refuses = refuse_and_go_away
    outbox = Outbox(client, spool)
    outbox.keep(MEASURED)
    with pytest.raises(ServiceUnreachableError):
        outbox.post()
    assert service.kept() == ["trial-1-attempt-2.json"]
    service.away = False
    Outbox(client, spool).post()
    assert service.posted()[1]["reason"] == "implausible"
    assert set_aside(service) == {"trial-1-attempt-2.json": "completed"}


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


def test_waiting_for_outcomes_ends_the_pause_between_two_tries(
    posting: Posting, service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"layout_tuner.workers.service.lease_client.{limit}", 3600.0)
    posting.take(make_report(2))
    posting.catch_up(PATIENCE_S)  # from here on its pauses are the long ones
    service.away = True
    posting.take(make_report(1))
    with pytest.raises(ServiceUnreachableError, match="outcomes wait"):
        posting.catch_up(0.5)
    service.away = False
    deadline = time.monotonic() + PATIENCE_S
    while 1 not in service.posted() and time.monotonic() < deadline:
        try:
            posting.catch_up(1.0)
        except ServiceUnreachableError:
            continue
    assert list(service.posted()) == [2, 1]


def test_closing_waits_for_a_last_try(
    service: WorkedService, client: LeaseClient, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"layout_tuner.workers.service.lease_client.{limit}", 3600.0)
    service.away = True
    posting = Posting(Outbox(client, spool))
    posting.take(make_report(1))
    with pytest.raises(ServiceUnreachableError, match="outcomes wait"):
        posting.catch_up(0.5)
    service.away = False
    posting.close(PATIENCE_S)
    assert list(service.posted()) == [1]


@pytest.mark.parametrize(
    ("token", "breaks_over"), [(TOKEN, {1}), ("another", set())], ids=["broken", "refused-token"]
)
def test_an_outcome_that_cannot_be_posted_holds_up_nobody(
    service: WorkedService, spool: Spool, token: str, breaks_over: set[int]
) -> None:
    service.breaks_over = breaks_over
    with LeaseClient(service.url, token) as client:
        posting = Posting(Outbox(client, spool))
        posting.take(make_report(1))
        posting.catch_up(PATIENCE_S)
        posting.close(PATIENCE_S)
    assert not service.outcomes


def make_kept(trial_id: int = 7) -> EncodedOutcome:
    return EncodedOutcome.of(make_report(trial_id))


def test_outcomes_that_are_kept_are_there_for_the_next_process(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.keep(make_kept(9))
        spool.keep(make_kept(3))
    with Spool(tmp_path / "spool") as spool:
        assert spool.kept() == [make_kept(9), make_kept(3)]
        spool.forget(make_kept(9))
        assert spool.kept() == [make_kept(3)]


def test_a_second_owner_and_a_directory_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Spool(tmp_path), pytest.raises(SpoolInUseError, match="another worker uses"):
        Spool(tmp_path)
    with pytest.raises(SpoolUnusableError, match="give another --spool-dir"):
        Spool(tmp_path / "file" / "spool")


def test_what_is_refused_or_is_no_outcome_is_set_aside_and_not_lost(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.keep(make_kept())
        spool.reject(make_kept(), "the trial is gone")
        (tmp_path / "other.json").write_text("{}")
        assert spool.kept() == []
    names = {path.name for path in (tmp_path / "rejected").iterdir()}
    assert names == {"trial-7-attempt-2.json", "other.json"}


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    (tmp_path / "trial-1-attempt-1.tmp").write_text('{"trial_id": 1,')
    with Spool(tmp_path) as spool:
        (tmp_path / "trial-1-attempt-1.json").mkdir()
        spool.keep(make_kept(9))
        assert spool.kept() == [make_kept(9)]
        assert (tmp_path / "trial-1-attempt-1.json").exists()


def test_a_directory_that_has_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.keep(make_kept())
        (tmp_path / "spool").rename(tmp_path / "elsewhere")
        with pytest.raises(SpoolUnusableError, match="the outcomes can't be read"):
            spool.kept()
        with pytest.raises(SpoolUnusableError, match="the outcome can't be written"):
            spool.keep(make_kept())
        with pytest.raises(SpoolUnusableError, match="the outcome can't be set aside"):
            spool.reject(make_kept(), "no reason")


def test_the_name_of_an_outcome_is_on_disk_before_it_counts_as_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        synced.append((is_directory, (tmp_path / "trial-7-attempt-2.json").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with Spool(tmp_path) as spool:
        spool.keep(make_kept())
    assert synced == [(False, False), (True, True)]


def test_what_workers_of_other_names_left_behind_is_taken_over(tmp_path: Path) -> None:
    for name, trial_id in (("job1-abc", 1), ("job2-abc", 2), ("job1-xyz", 3)):
        with Spool(tmp_path / name) as spool:
            spool.keep(make_kept(trial_id))
    with Spool(tmp_path / "job2-abc"), Spool(tmp_path / "job3-abc") as spool:
        adopt_abandoned(spool, "*-abc")
        assert spool.kept() == [make_kept(1)], "not of a worker that lives, nor another service's"
