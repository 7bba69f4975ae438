"""One `srun` inside an allocation: starts it, watches it, and ends its step in every case."""

from __future__ import annotations

import logging
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Final

from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.workers.errors import RanksLeftError, SlurmRefusedError, SlurmUnavailableError
from layout_tuner.workers.ranks.processes import ended_within, last_words
from layout_tuner.workers.slurm.jobs import call

_LOG = logging.getLogger(__name__)

_CLEAN_END_WITHIN_S: Final = 15.0
_END_WITHIN_S: Final = 2.0
_TAKEN_OFF_THE_BOOKS_WITHIN_S: Final = 3.0
_GONE_WITHIN_S: Final = 60.0
"""Slurm sends SIGTERM to the processes of a step, and SIGKILL after its KillWait, 30 s by
default."""
_LAST_WORDS: Final = 5

_NOISE: Final = "lacks support for cpu binding"
"""Printed at every step of a site without CPU binding, which these steps do not request."""

_OTHERS_WISHES: Final = (
    "SLURM_CLUSTERS",
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXPORT_ENV",
    "SLURM_GPU",
    "SLURM_HOSTFILE",
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
"""Variables of the batch script, or of an enclosing step, that `srun` would read as options."""


class SrunProcess:
    """A step of a job, with a unique name, and its `srun` with the whole environment of the tasks.

    Raises:
        OSError: `srun` is not installed here, or no process can be started.
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
        ours = (f"--jobid={job_id}", f"--job-name={name}", "--export=ALL")
        try:
            self._process = subprocess.Popen(
                ["srun", *ours, *options],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # this process handles interrupts of the terminal
            )
        except OSError:
            self._log.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """The exit code of `srun`; None: it still runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last lines that `srun` and the tasks printed; empty: there are none."""
        return last_words(self._log.fileno(), _LAST_WORDS, but_not=_NOISE)

    def end(self, *, step_id: str | None, is_clean: bool, tasks_are_gone: bool) -> None:
        """Ends the step; returns when no process of it is left.

        Args:
            step_id: as JOB.STEP, where a node has reported it.
            is_clean: whether every node has reported that no process is left on it.
            tasks_are_gone: whether the task on every node has ended, so that its warden ends all
                processes below it, even if Slurm still lists the step: it does so where Slurm's own
                processes were killed.

        Raises:
            RanksLeftError: Slurm still lists the step as running.
        """
        try:
            ended = ended_within(self._process, _CLEAN_END_WITHIN_S if is_clean else _END_WITHIN_S)
            if not ended:
                self._process.terminate()
                ended = ended_within(self._process, _END_WITHIN_S)
            if not (ended and is_clean and self._process.returncode == 0):
                self._have_it_cancelled(step_id, tasks_are_gone=tasks_are_gone)
        finally:
            self._process.kill()
            self._process.wait()
            self._log.close()

    def _have_it_cancelled(self, step_id: str | None, *, tasks_are_gone: bool) -> None:
        patience_s = _TAKEN_OFF_THE_BOOKS_WITHIN_S if tasks_are_gone else _GONE_WITHIN_S
        give_up_at = time.monotonic() + patience_s
        backoff = Backoff(0.05, 2.0)
        cancelled = False
        while (running := self._running_step(step_id)) is not None:
            if not cancelled:
                cancelled = self._ask("scancel", running) is not None
            if time.monotonic() > give_up_at:
                still = f"step {running} still runs {patience_s:g} s after it was cancelled"
                if tasks_are_gone:
                    return _LOG.warning("Slurm says that %s; its tasks have ended", still)
                raise RanksLeftError(f"{still}; see `scontrol show step {running}`")
            time.sleep(backoff.take())
        return None

    def _running_step(self, step_id: str | None) -> str | None:
        """The step's id while Slurm lists it as running; None: it has ended.

        Where Slurm does not answer, the step counts as running.
        """
        asked = self._ask("squeue", "--steps", "--noheader", "--jobs", self._job_id, "-o", "%i %j")
        if asked is None:
            return step_id or f"{self._name} of job {self._job_id}"
        for line in asked.splitlines():  # SLURM_CLUSTERS, with which others are printed, is not set
            known_id, _, name = line.strip().partition(" ")
            if known_id == step_id or name == self._name:
                return known_id
        return None

    def _ask(self, *command: str) -> str | None:
        """The output of a program of Slurm; None: it failed."""
        try:
            return call(*command, environ=self._environment)
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            if "Invalid job id" in str(error):  # the controller no longer knows the job
                return ""
            _LOG.warning("%s", error)
            return None
