"""The warden: its agent starts it; it starts one command, and ends all of its descendants.

It is a small process in a session of its own, without torch, and watches no deadline. It ends all
processes below it when its command ends, after SIGTERM, or when one of its guardians ends for any
reason: the process that started it, and the raylet above that process where there is one.

    python -m layout_tuner.workers.ranks.warden --guardian PID ... [--remove DIR] -- COMMAND...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from layout_tuner import step_reports
from layout_tuner.workers.ranks.processes import (
    OnReaped,
    become_subreaper,
    children,
    die_with_parent,
    end_descendants,
    end_signals,
    kill,
    reap,
)
from layout_tuner.workers.ranks.scratch import HeldDirectory, remove

_LOOK_EVERY_MS: Final = 1000


def python_module(name: str) -> list[str]:
    """The command that runs a module with this interpreter.

    Without -P, Python would search the module in the current directory first, and run a module of
    the user that has the same name.
    """
    return [sys.executable, "-P", "-m", name]


def with_our_package(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with this package first in PYTHONPATH, before others of its name."""
    package_root = str(Path(step_reports.__file__).parents[1])
    inherited = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{package_root}:{inherited}" if inherited else package_root}


def start_under_warden(
    command: Sequence[str],
    *,
    env: dict[str, str],
    pass_fds: Sequence[int] = (),
    other_guardians: Sequence[int] = (),
    directory: HeldDirectory | None = None,
    has_daemons: bool = False,
    log_fd: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a command under a warden of this process.

    Args:
        command: the command.
        env: its whole environment.
        pass_fds: descriptors that it inherits; the warden itself closes them.
        other_guardians: pids of further processes whose end ends the command.
        directory: is held by the warden, which removes it when all processes have ended.
        has_daemons: whether processes that the command detaches from itself live as long as the
            command; otherwise they end with the process that started them.
        log_fd: descriptor for its output and errors; None: this process's standard error.
    """
    flags = [f"--guardian={pid}" for pid in (os.getpid(), *other_guardians)]
    flags += [f"--pass-fd={fd}" for fd in pass_fds]
    flags += [] if directory is None else [f"--remove={directory.path}"]
    flags += ["--has-daemons"] if has_daemons else []
    return subprocess.Popen(
        [*python_module("layout_tuner.workers.ranks.warden"), *flags, "--", *command],
        env=with_our_package(env),
        pass_fds=[*pass_fds, *([] if directory is None else [directory.lock_fd])],
        stdin=subprocess.DEVNULL,
        stdout=2 if log_fd is None else log_fd,
        stderr=log_fd,
        start_new_session=True,
    )


def watch(
    guardians: Sequence[int],
    command: Sequence[str],
    pass_fds: Sequence[int],
    *,
    has_daemons: bool = False,
) -> int:
    """Runs the command until it, or a guardian, ends; returns its exit code."""
    signalled = end_signals()
    become_subreaper()
    try:
        watched = [os.pidfd_open(pid) for pid in guardians]
    except ProcessLookupError:  # one has ended already
        return 1
    # The parent is the first guardian. If it has changed, the pidfd may be of another process.
    if os.getppid() != guardians[0]:
        return 1
    # If this process is killed, the kernel ends the command.
    child = subprocess.Popen(
        command, pass_fds=pass_fds, preexec_fn=partial(die_with_parent, os.getpid())
    )
    for fd in pass_fds:
        os.close(fd)
    poll = select.poll()
    for fd in (signalled, os.pidfd_open(child.pid), *watched):
        poll.register(fd, select.POLLIN)
    statuses: dict[int, int] = {}

    def note(pid: int, status: int, _peak_rss_bytes: int) -> None:
        statuses[pid] = status

    strays: set[int] = set()
    while not poll.poll(_LOOK_EVERY_MS):
        if has_daemons:
            reap(note)
        else:
            strays = _end_strays(command_pid=child.pid, seen_before=strays, on_reaped=note)
    end_descendants(on_reaped=note)
    code = os.waitstatus_to_exitcode(statuses[child.pid])
    child.returncode = code  # reaped here: Popen must not wait for it again
    return code if code >= 0 else 128 - code


def _end_strays(*, command_pid: int, seen_before: Collection[int], on_reaped: OnReaped) -> set[int]:
    """Kills orphans that the last look has found too; returns the orphans of this look.

    Orphans are left by processes that were killed before they could end the processes below them.
    One look is not enough: a warden whose parent was killed is adopted too, and must end its own
    first.
    """
    reap(on_reaped)
    strays = set(children()) - {command_pid}
    kill(strays & set(seen_before))
    return strays


def main() -> None:
    parser = argparse.ArgumentParser(prog="layout_tuner.workers.ranks.warden", description=__doc__)
    parser.add_argument("--guardian", type=int, action="append", required=True)
    parser.add_argument("--pass-fd", type=int, action="append", default=[])
    parser.add_argument("--remove", type=Path)
    parser.add_argument("--has-daemons", action="store_true")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    code = watch(
        arguments.guardian, arguments.command, arguments.pass_fd, has_daemons=arguments.has_daemons
    )
    if arguments.remove is not None:
        with contextlib.suppress(OSError):  # it is removed already, or the next start removes it
            remove(arguments.remove)
    sys.exit(code)


if __name__ == "__main__":
    main()
