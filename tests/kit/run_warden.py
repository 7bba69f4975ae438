"""The warden of a run of the tests: it ends whatever processes the run leaves, however it ends.

Teardown is not enough. After an interrupt pytest-xdist kills a process of tests that is not at its
end ten seconds later, a second interrupt breaks teardown off, and a test may have started services
without a fixture.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from functools import cache
from typing import Final

from layout_tuner.workers.ranks.processes import (
    become_subreaper,
    children,
    die_with_parent,
    end_descendants,
    reap,
)

ORDERLY_END_S: Final = 15.0
"""Seconds that tests which are told to end have for it; pytest-xdist takes up to ten."""
_LEFT_END_S: Final = 5.0
"""Seconds from SIGTERM to SIGKILL of what is left: PostgreSQL gives its shared memory back."""
_KILLED_END_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0
_PAUSE_S: Final = 0.02

_FROM_KERNEL: Final = 0x80
"""`SI_KERNEL`: the terminal sent the signal, and the tests have got it too."""
_TOLD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAITED_FOR: Final = (*_TOLD, signal.SIGQUIT, signal.SIGCHLD)


@cache  # one warden is enough for a program that runs pytest several times
def go_on_below_a_warden() -> None:
    """Forks, and returns in the child: the tests run there.

    The parent keeps the pid that was started. As a subreaper it gets the orphans of the run, also
    those in sessions of their own. When the tests have ended it ends all that is left, and exits
    with their code. It has the process group of the tests, so that a terminal stops, continues and
    interrupts both; if it is told alone to end, it interrupts the tests. Only SIGKILL of the
    warden itself can leave processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    warden = os.getpid()
    become_subreaper()  # a fork does not inherit it
    tests = os.fork()
    if tests == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with_parent(warden)
        return
    code = 1
    try:
        code = _watch(tests)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(tests: int) -> int:
    """Waits for the end of the tests, and ends what is left; returns the exit code."""
    statuses: dict[int, int] = {}

    def note(pid: int, status: int, _peak_rss_bytes: int) -> None:
        statuses[pid] = status

    give_up_at = float("inf")
    while tests not in statuses and time.monotonic() < give_up_at:
        caught = signal.sigtimedwait(_WAITED_FOR, _LOOK_EVERY_S)
        if caught and caught.si_signo in _TOLD and caught.si_code != _FROM_KERNEL:
            os.kill(tests, signal.SIGINT)
            if caught.si_signo != signal.SIGINT:
                give_up_at = min(give_up_at, time.monotonic() + ORDERLY_END_S)
        reap(note)
    kill_at, told = time.monotonic() + _LEFT_END_S, set[int]()
    while reap(note) and time.monotonic() < kill_at:
        # Those whose parents have just ended are adopted now. None that is not reaped yet has a pid
        # that another process could get.
        for pid in set(children()) - told:
            os.kill(pid, signal.SIGTERM)
            told.add(pid)
        time.sleep(_PAUSE_S)
    end_descendants(on_reaped=note, deadline_s=_KILLED_END_S)
    code = os.waitstatus_to_exitcode(statuses[tests])
    return code if code >= 0 else 128 - code
