"""The warden: runs one command, and leaves none of its descendants behind.

It is a small process in a session of its own, without torch. It ends everything below it when its
command ends, when it is told to (SIGTERM), or when one of its guardians ends, be it by SIGKILL:
the process that started it, and the raylet above that one where there is one.

    python -m workers.warden --guardian PID [--guardian PID] [--remove DIRECTORY] -- COMMAND...
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from workers.processes import become_subreaper, end_descendants

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def python_module(name: str) -> list[str]:
    """The command that runs a module with this interpreter.

    -P: `python -m` alone looks for the module in the current directory first, and a directory of
    the user's that happens to hold one of that name would be run instead.
    """
    return [sys.executable, "-P", "-m", name]


def with_our_package(env: Mapping[str, str]) -> dict[str, str]:
    """The environment, in which Python finds this package before any other of its name."""
    package_root = str(Path(__file__).parent.parent)
    inherited = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{package_root}:{inherited}" if inherited else package_root}


def start_under_warden(
    command: Sequence[str],
    *,
    env: dict[str, str],
    pass_fds: Sequence[int] = (),
    other_guardians: Sequence[int] = (),
    remove: Path | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a command under a warden of this process.

    Args:
        command: what to run.
        env: its whole environment.
        pass_fds: descriptors that it inherits; the warden itself closes them.
        other_guardians: pids besides this process whose end ends the command.
        remove: a directory that the warden removes when everything has ended.
        stdout: descriptor for its output; None: this process's standard error.
        stderr: descriptor for its errors; None: this process's.
    """
    guardians = [f"--guardian={pid}" for pid in (os.getpid(), *other_guardians)]
    fds = [f"--pass-fd={fd}" for fd in pass_fds]
    directory = [] if remove is None else [f"--remove={remove}"]
    return subprocess.Popen(
        [*python_module("workers.warden"), *guardians, *fds, *directory, "--", *command],
        env=with_our_package(env),
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=2 if stdout is None else stdout,
        stderr=stderr,
        start_new_session=True,
    )


def watch(guardians: Sequence[int], command: Sequence[str], pass_fds: Sequence[int]) -> int:
    """Runs the command until it, or a guardian, ends; returns its exit code."""
    told_r, told_w = os.pipe()
    os.set_blocking(told_w, False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(told_w, warn_on_full_buffer=False)
    become_subreaper()
    watched = _pidfds(guardians)
    # Our parent is the first guardian: if it is another now, the pidfd may be of a stranger.
    if watched is None or os.getppid() != guardians[0]:
        return 1
    child = subprocess.Popen(command, pass_fds=pass_fds)
    for fd in pass_fds:
        os.close(fd)
    poll = select.poll()
    for fd in (told_r, os.pidfd_open(child.pid), *watched):
        poll.register(fd, select.POLLIN)
    poll.poll()
    statuses: dict[int, int] = {}
    end_descendants(on_reaped=lambda pid, status, _: statuses.update({pid: status}))
    code = os.waitstatus_to_exitcode(statuses[child.pid])
    child.returncode = code  # reaped here: Popen must not wait for it again
    return code if code >= 0 else 128 - code


def _pidfds(pids: Sequence[int]) -> list[int] | None:
    """A pidfd of each process, or None when one has ended already."""
    try:
        return [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="workers.warden", description=__doc__)
    parser.add_argument("--guardian", type=int, action="append", required=True)
    parser.add_argument("--pass-fd", type=int, action="append", default=[])
    parser.add_argument("--remove", type=Path)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    code = watch(arguments.guardian, arguments.command, arguments.pass_fd)
    if arguments.remove is not None:
        shutil.rmtree(arguments.remove, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
