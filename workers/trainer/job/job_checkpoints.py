"""A job's checkpoints while it runs: what all ranks do together, and what rank 0 does for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist

from workers.trainer.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointRecord,
    CheckpointSettings,
)
from workers.trainer.collectives import barrier
from workers.trainer.errors import CheckpointFailedError, CheckpointInvalidError
from workers.trainer.job import TrainJob
from workers.trainer.training import Training

T = TypeVar("T")
Report = Callable[[dict[str, Any]], None]


class JobCheckpoints:
    """Saves a job every so many steps, and takes it up again.

    Every method is called by all ranks; rank 0 alone touches the directory's names, and reports.
    """

    def __init__(
        self, job: TrainJob, settings: CheckpointSettings, training: Training, report: Report
    ) -> None:
        self._job, self._settings, self._training, self._report = job, settings, training, report
        self._directory = CheckpointDirectory(settings.directory)
        self._first_step = self._first_sample = 0

    def resume(self) -> tuple[int, int]:
        """Loads the newest whole checkpoint, if there is one.

        Returns:
            The next step, and the samples that were taken before it.

        Raises:
            CheckpointInvalidError: there is one that this job can't use, or nothing can be
                written, or a rank does not see the directory.
            CheckpointFailedError: a rank could not read it.
        """
        self._refuse_unshared()
        for left in self._on_rank_0(self._directory.partial):
            self._tell({"event": "note", "message": f"ignoring {left}, which was never finished"})
        newest = self._on_rank_0(self._job.newest_checkpoint)
        if newest is None:
            return 0, 0
        path, record = newest
        self._tell(
            {
                "event": "resume",
                "step": record.step,
                "steps": self._job.steps,
                "path": str(path),
                "layout": record.layout.key,
            }
        )
        from workers.trainer.checkpoint import load_state

        load_state(self._training, path)
        self._restore_counts(record)
        self._first_step, self._first_sample = record.step, record.samples
        return record.step, record.samples

    def _restore_counts(self, record: CheckpointRecord) -> None:
        optimizer = self._training.optimizer
        for steps in optimizer.steps:
            steps.fill_(record.optimizer_steps)
        if optimizer.scaler is not None and record.loss_scaler is not None:
            optimizer.scaler.scale = float(record.loss_scaler["scale"])
            optimizer.scaler.good_steps = int(record.loss_scaler["good_steps"])

    def save_if_due(self, step: int) -> None:
        """Saves after so many steps of the job, where the settings say so, or it was the last.

        Raises:
            CheckpointFailedError: on every rank, if any of them could not write; the earlier
                checkpoints are as they were.
        """
        if step % self._settings.every and step != self._job.steps:
            return
        from workers.trainer.checkpoint import save_state

        started = time.perf_counter()
        folder = self._on_rank_0(lambda: self._directory.begin(step))
        save_state(self._training, folder)
        path = self._on_rank_0(lambda: self._finish(folder, step))
        self._tell(
            {
                "event": "checkpoint",
                "step": step,
                "path": str(path),
                "bytes": sum(file.stat().st_size for file in path.iterdir())
                if self._is_first
                else 0,
                "seconds": time.perf_counter() - started,
            }
        )

    def _finish(self, folder: Path, step: int) -> Path:
        path = self._directory.commit(folder, self._record(step))
        self._directory.prune(self._settings.keep)
        return path

    def _record(self, step: int) -> CheckpointRecord:
        job, optimizer = self._job, self._training.optimizer
        taken = (step - self._first_step) * job.layout.global_batch_size
        scaler = optimizer.scaler
        return CheckpointRecord(
            step=step,
            samples=self._first_sample + taken,
            model=job.model,
            seed=job.seed,
            layout=job.layout,
            tokens=job.describe_tokens(),
            optimizer_steps=round(optimizer.steps[0].item()) if optimizer.steps else 0,
            loss_scaler=None
            if scaler is None
            else {"scale": scaler.scale, "good_steps": scaler.good_steps},
        )

    def _refuse_unshared(self) -> None:
        """Raises CheckpointInvalidError where a rank does not see what rank 0 writes."""
        mark = self._on_rank_0(self._directory.mark)
        seen = mark.exists()
        barrier(self._training.device)
        self._on_rank_0(lambda: mark.unlink())
        if not seen:
            raise CheckpointInvalidError(
                f"rank {self._training.mesh.rank} on {socket.gethostname()} does not see the "
                f"checkpoint directory {self._settings.directory} of rank 0; "
                "name one that all nodes share"
            )

    @property
    def _is_first(self) -> bool:
        return self._training.mesh.rank == 0

    def _tell(self, event: dict[str, Any]) -> None:
        if self._is_first:
            self._report(event)

    def _on_rank_0(self, act: Callable[[], T]) -> T:
        """What rank 0 finds, told to all; if it fails there, it fails on all."""
        said: list[Any] = [None, None]
        if self._is_first:
            try:
                said[0] = act()
            except CheckpointInvalidError as error:
                said[1] = error
            except OSError as error:
                said[1] = CheckpointFailedError(
                    f"no checkpoint can be written to {self._settings.directory}: {error}"
                )
        if self._training.mesh.layout.num_devices > 1:
            dist.broadcast_object_list(said, src=0)
        found, failure = said
        if failure is not None:
            raise failure
        result: T = found
        return result
