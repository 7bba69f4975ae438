"""One `srun` inside an allocation: started, watched, and ended whatever it takes."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Final

from workers.errors import RanksLeftError
from workers.slurm.errors import SlurmRefusedError, SlurmUnavailableError
from workers.slurm.programs import call

_LOG = logging.getLogger(__name__)

_CLEAN_END_WITHIN_S: Final = 15.0
_END_WITHIN_S: Final = 2.0
_TAKEN_OFF_THE_BOOKS_WITHIN_S: Final = 3.0
_GONE_WITHIN_S: Final = 60.0
"""Slurm sends SIGTERM to what is left of a step, and SIGKILL after its KillWait, 30 s by default."""
_LAST_WORDS: Final = 5
_LOG_TAIL_BYTES: Final = 8 << 10

_NOISE: Final = "lacks support for cpu binding"
"""Said at every step of a site without it; ours asks for no binding."""

_OTHERS_WISHES: Final = (
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXPORT_ENV",
    "SLURM_GPU",
    "SLURM_LABELIO",
    "SLURM_LOCALID",
    "SLURM_MEM_",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP",
    "SLURM_TASKS_PER_NODE",
    "SLURM_TRES_PER_TASK",
)
"""Variables of the batch script, or of a step that we are in, which `srun` would take for options."""


class SrunProcess:
    """A step of a job, as its `srun` and the batch system know it.

    Args:
        job_id: the allocation's.
        name: of the step, one of a kind.
        options: what `srun` is asked for, and the command.
        environment: of the tasks, whole.

    Raises:
        OSError: there is no `srun` here, or no process can be started.
    """

    def __init__(
        self, *, job_id: str, name: str, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._job_id = job_id
        self._name = name
        self._environment = {
            variable: value
            for variable, value in environment.items()
            if not variable.startswith(_OTHERS_WISHES)
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the step)
        try:
            self._process = self._start(options)
        except OSError:
            self._log.close()
            raise

    @property
    def pid(self) -> int:
        """Of `srun` itself."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """How `srun` ended; None: it has not."""
        return self._process.poll()

    def last_words(self) -> str:
        """What `srun`, and whatever the tasks print, said last; empty: nothing."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        lines = [line for line in tail.decode(errors="replace").splitlines() if _NOISE not in line]
        return " / ".join(lines[-_LAST_WORDS:])

    def end(self, *, step_id: str | None, is_clean: bool, tasks_are_gone: bool) -> None:
        """Returns when nothing is left of the step.

        Args:
            step_id: as JOB.STEP, where a node has told it.
            is_clean: whether every node has said that nothing is left on it.
            tasks_are_gone: whether the task on every node has ended, and so all below it, whatever
                the batch system says: one whose own processes were killed never hears of that.

        Raises:
            RanksLeftError: the batch system still counts the step among those that run.
        """
        try:
            ended = self._wait(_CLEAN_END_WITHIN_S if is_clean else _END_WITHIN_S)
            if not ended:
                self._process.terminate()
                ended = self._wait(_END_WITHIN_S)
            if not (ended and is_clean and self._process.returncode == 0):
                self._have_it_cancelled(step_id, tasks_are_gone=tasks_are_gone)
        finally:
            self._process.kill()
            self._process.wait()
            self._log.close()

    def _start(self, options: Sequence[str]) -> subprocess.Popen[bytes]:
        ours = (f"--jobid={self._job_id}", f"--job-name={self._name}", "--export=ALL")
        return subprocess.Popen(
            ["srun", *ours, *options],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # an interrupt of the terminal is ours to handle
        )

    def _have_it_cancelled(self, step_id: str | None, *, tasks_are_gone: bool) -> None:
        patience_s = _TAKEN_OFF_THE_BOOKS_WITHIN_S if tasks_are_gone else _GONE_WITHIN_S
        give_up_at = time.monotonic() + patience_s
        pause_s = 0.05
        cancelled = False
        while (running := self._running_step(step_id)) is not None:
            if not cancelled:
                cancelled = self._ask("scancel", running) is not None
            if time.monotonic() > give_up_at:
                still = f"step {running} still runs {patience_s:g} s after it was cancelled"
                if tasks_are_gone:
                    return _LOG.warning("Slurm says that %s; its tasks have ended", still)
                raise RanksLeftError(f"{still}; see `scontrol show step {running}`")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)
        return None

    def _running_step(self, step_id: str | None) -> str | None:
        """The step's id while the batch system counts it among those that run.

        One that does not answer is taken to: what can't be seen to have ended may be running.
        """
        asked = self._ask("squeue", "--steps", "--noheader", "--jobs", self._job_id, "-o", "%i %j")
        if asked is None:
            return step_id or f"{self._name} of job {self._job_id}"
        for line in asked.splitlines():
            known_id, _, name = line.strip().partition(" ")
            if known_id == step_id or name == self._name:
                return known_id
        return None

    def _ask(self, *command: str) -> str | None:
        """What a program of Slurm's answers; None: nothing."""
        try:
            return call(*command, environ=self._environment)
        except SlurmRefusedError as error:
            if "Invalid job id" in str(error):  # the whole job is gone from the controller's memory
                return ""
            _LOG.warning("%s", error)
        except SlurmUnavailableError as error:
            _LOG.warning("%s", error)
        return None

    def _wait(self, within_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None
