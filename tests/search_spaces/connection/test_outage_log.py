"""One line when something starts to fail, one when it works again, and never a flood."""

from __future__ import annotations

import logging
import threading

import pytest

from search_spaces.connection.outage_log import MOST_STARTS, START_WINDOW_S, OutageLog

LOG = logging.getLogger("tests.outage")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

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
    outage = OutageLog(LOG, "the disk", clock=clock)
    outage.worked()
    assert lines(caplog) == []
    for _ in range(100):
        outage.failed("the disk is full")
        outage.failed("the disk is gone")
    (start,) = lines(caplog)
    assert start.startswith("the disk is full; ")
    clock.now = 12.34
    outage.worked()
    outage.worked()
    assert lines(caplog)[1:] == ["the disk works again after 12.3 s (failed attempts: 200)"]


def test_each_reason_of_an_outage_is_written_once_where_several_are_wanted(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the round", most_reasons=2, clock=clock)
    for reason in ("one", "two", "one", "three", "two"):
        outage.failed(reason)
    assert [line.split(";")[0] for line in lines(caplog)] == ["one", "two"]


def test_what_fails_and_works_in_turn_does_not_flood_and_is_counted(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the page", clock=clock)
    for _ in range(100):
        outage.failed("the page is damaged")
        outage.worked()
    assert len(lines(caplog)) == 2 * MOST_STARTS
    clock.now = START_WINDOW_S
    outage.failed("the page is damaged")
    assert f"({100 - MOST_STARTS} shorter outages before it were not written)" in lines(caplog)[-1]


def test_an_outage_that_was_not_written_at_its_start_is_written_when_it_lasts(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the page", clock=clock)
    for _ in range(MOST_STARTS):
        outage.failed("it is away")
        outage.worked()
    outage.failed("it is away for long")
    assert len(lines(caplog)) == 2 * MOST_STARTS
    clock.now = START_WINDOW_S
    outage.failed("it is away for long")
    outage.worked()
    assert lines(caplog)[-2].startswith("it is away for long; ")
    assert lines(caplog)[-1] == "the page works again after 60.0 s (failed attempts: 2)"


def test_threads_that_fail_at_once_write_one_line(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(LOG, "the database")
    together = threading.Barrier(8)

    def fail() -> None:
        together.wait()
        for _ in range(200):
            outage.failed("it is away")

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outage.worked()
    assert len(lines(caplog)) == 2
    assert lines(caplog)[1].endswith("(failed attempts: 1600)")
