"""One line when something starts to fail, one when it works again, and never a flood."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from search_spaces.connection.outage_log import MOST_STARTS, START_WINDOW_S, OutageLog
from search_spaces.errors import LayoutTunerError

LOG = logging.getLogger("tests.outage")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_outage_is_one_line_at_its_start_and_one_with_its_duration_at_its_end(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the disk", most_reasons=2, clock=clock)
    outage.worked()
    assert lines(caplog) == []
    for _ in range(100):
        for reason in ("the disk is full", "the disk is gone", "the disk is back"):
            outage.failed(reason)
    starts = [line.split("; ")[0] for line in lines(caplog)]
    assert starts == ["the disk is full", "the disk is gone"], "as many reasons as are wanted"
    clock.now = 12.34
    outage.worked()
    outage.worked()
    assert lines(caplog)[2:] == ["the disk works again after 12.3 s (failed attempts: 300)"]


def test_an_outage_ends_once_nothing_has_failed_for_a_while_and_its_own_part_works(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the service", settled_after_s=6.0, clock=clock)
    for _ in range(100):
        outage.failed("leases are refused")
        clock.now += 5
        outage.worked()
    assert len(lines(caplog)) == 1
    clock.now += 1
    outage.worked()
    assert lines(caplog)[1:] == ["the service works again after 500.0 s (failed attempts: 100)"]
    caplog.clear()
    outage = OutageLog(LOG, "the database")
    outage.failed("the disk is full", part="writing")
    outage.worked("reading")
    assert len(lines(caplog)) == 1
    outage.worked("writing")
    assert len(lines(caplog)) == 2


def test_a_traceback_is_written_of_errors_that_nobody_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged = LayoutTunerError("it is away")
    logged.is_logged = True
    outage = OutageLog(LOG, "the round")
    for error in (LayoutTunerError("it is full"), logged, ZeroDivisionError("a bug")):
        outage.failed("this round failed", error)
    starts = [line.split(";")[0] for line in lines(caplog)]
    assert starts == ["this round failed: it is full", "this round failed: a bug"]
    assert [record.exc_info is not None for record in caplog.records] == [False, True]


def test_what_fails_and_works_in_turn_does_not_flood_and_is_written_once_it_lasts(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the page", clock=clock)
    for _ in range(100):
        outage.failed("the page is damaged")
        outage.worked()
    outage.failed("the page is away")
    assert len(lines(caplog)) == 2 * MOST_STARTS
    clock.now = START_WINDOW_S
    outage.failed("the page is away for long")
    outage.worked()
    start, end = lines(caplog)[2 * MOST_STARTS :]
    assert start.startswith("the page is away for long; ")
    assert f"({100 - MOST_STARTS} shorter outages before it were not written)" in start
    assert end == "the page works again after 60.0 s (failed attempts: 2)"


def test_threads_that_fail_at_once_write_one_line(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(LOG, "the database")
    together = threading.Barrier(8)

    def fail(_: int) -> None:
        together.wait()
        for _ in range(200):
            outage.failed("it is away")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(8)))
    outage.worked()
    assert len(lines(caplog)) == 2
    assert lines(caplog)[1].endswith("(failed attempts: 1600)")
