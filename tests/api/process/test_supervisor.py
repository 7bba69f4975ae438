"""The supervisor, over real processes that do little."""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from layout_tuner.api.errors import ServiceStartError, ServiceUnstableError
from layout_tuner.api.process import supervisor
from layout_tuner.api.process.supervisor import (
    MAX_RESTARTS,
    Child,
    start_and_wait,
    until_signalled,
    watch,
)
from tests.kit.python_process import start_python
from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive, kill

STAYS = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + STAYS


MakeChild = Callable[[str], Child]


@pytest.fixture
def make_child(tmp_path: Path) -> Iterator[MakeChild]:
    made: list[Child] = []

    def make(program: str) -> Child:
        argv = [sys.executable, "-c", program]
        made.append(Child(name="child", argv=argv, log=tmp_path / f"{len(made)}.log"))
        return made[-1]

    yield make
    for child in made:
        if child.process is not None:
            child.process.kill()
            child.process.wait()


def test_a_child_that_keeps_ending_is_given_up_with_its_last_words(make_child: MakeChild) -> None:
    child = make_child("print('no luck'); raise SystemExit(3)")
    child.start()
    said: list[str] = []
    with pytest.raises(ServiceUnstableError) as given_up:
        watch([child], stopping=lambda: False, say=said.append, each_round=lambda: None)
    assert "child ended 6 times within 60 s" in str(given_up.value)
    assert str(given_up.value).endswith("the last lines:\nno luck")
    assert len(said) == MAX_RESTARTS == 5
    assert said[0].startswith("child ended with exit code 3; starting it again")
    assert child.log.read_text() == "no luck\n" * 6


def test_restarts_of_more_than_a_minute_ago_are_forgiven(make_child: MakeChild) -> None:
    child = make_child(STAYS)
    child.start()
    child.restarts = deque([time.monotonic() - 61] * MAX_RESTARTS)
    first = child.process.pid
    child.process.kill()
    said: list[str] = []
    watch([child], stopping=lambda: bool(said), say=said.append, each_round=lambda: None)
    assert said[0].startswith("child ended by signal 9; starting it again")
    assert child.process.pid != first
    assert child.returncode() is None
    assert len(child.restarts) == 1


def test_nothing_is_started_again_once_the_end_has_come(make_child: MakeChild) -> None:
    child = make_child("")
    child.start()
    rounds: list[int] = []
    wait_until("the child has ended", lambda: child.returncode() is not None)
    stopping = iter([False, True, True]).__next__
    watch([child], stopping=stopping, say=pytest.fail, each_round=lambda: rounds.append(1))
    assert rounds == [1]


def test_a_child_that_cannot_start_says_why_itself(make_child: MakeChild) -> None:
    child = make_child("raise SystemExit('Error: the port is taken')")
    child.log.write_text("what an earlier process wrote\n")
    with pytest.raises(ServiceStartError) as failed:
        start_and_wait(child, lambda: False, 30)
    assert str(failed.value) == "the port is taken"
    silent = make_child("raise SystemExit(1)")
    with pytest.raises(ServiceStartError, match="child ended without a word"):
        start_and_wait(silent, lambda: False, 30)


def test_bytes_that_are_no_text_do_not_hide_the_last_words(make_child: MakeChild) -> None:
    child = make_child("")
    child.log.write_bytes(b"no \xff luck\n")
    assert child.log_tail() == "no \ufffd luck"


def test_a_child_is_waited_for_until_it_is_ready_and_stopped_if_it_never_is(
    make_child: MakeChild,
) -> None:
    child = make_child(STAYS)
    with pytest.raises(ServiceStartError, match=r"not ready within 0 s; its log is .*0\.log"):
        start_and_wait(child, lambda: False, 0.2)
    assert child.returncode() == -signal.SIGTERM
    child = make_child(STAYS)
    start_and_wait(child, lambda: "here" in child.log.read_text(), 30)
    assert child.returncode() is None


def test_a_child_that_does_not_end_when_asked_is_killed(
    make_child: MakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_PATIENCE_S", 0.2)
    child = make_child(STUBBORN)
    child.stop()  # not started yet: nothing to do
    start_and_wait(child, lambda: "here" in child.log.read_text(), 30)
    child.stop()
    assert child.returncode() == -signal.SIGKILL
    child.stop()


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from layout_tuner.api.process.supervisor import Child\n"
        f"child = Child(name='c', argv=[sys.executable, '-c', {STAYS!r}], log=Path(sys.argv[1]))\n"
        "child.start()\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = start_python(program, str(tmp_path / "log"))
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until("the child runs", lambda: "here" in (tmp_path / "log").read_text())
    parent.kill()
    parent.communicate()
    try:
        wait_until("the child has ended with its parent", lambda: not is_alive(child.pid))
    finally:
        kill([child])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noticed_and_handled_by_nobody_else(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with until_signalled() as signalled:
        assert not signalled()
        os.kill(os.getpid(), number)
        wait_until("the signal is noticed", signalled)
    assert signal.getsignal(number) is before
