"""A running job's checkpoints: all ranks save and load together, rank 0 handles the directory."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from layout_tuner.documents.reading import why_unreadable
from layout_tuner.workers.trainer.comm.collectives import barrier
from layout_tuner.workers.trainer.comm.messages import broadcast_document, reading_from
from layout_tuner.workers.trainer.errors import CheckpointFailedError, CheckpointInvalidError
from layout_tuner.workers.trainer.job.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointRecord,
    CheckpointSettings,
)
from layout_tuner.workers.trainer.job.job import TrainJob
from layout_tuner.workers.trainer.training import Training

T = TypeVar("T")
Report = Callable[[dict[str, Any]], None]


class JobCheckpoints:
    """Saves a job regularly, and resumes it.

    All ranks call every method. Only rank 0 lists, renames and removes checkpoints, and reports.
    """

    def __init__(
        self, job: TrainJob, settings: CheckpointSettings, training: Training, report: Report
    ) -> None:
        self._job, self._settings, self._training = job, settings, training
        self._is_first = training.mesh.rank == 0
        self._report: Report = report if self._is_first else lambda _event: None
        self._directory = CheckpointDirectory(settings.directory)
        self._first_step = self._first_sample = 0

    def resume(self) -> tuple[int, int]:
        """Loads the newest complete checkpoint, if there is one.

        Communicates: broadcasts from rank 0 over all ranks, and what `load_state` does.

        Returns:
            The next step, and the samples that were used before it.

        Raises:
            CheckpointInvalidError: this job can't use the newest checkpoint, or nothing can be
                written, or a rank does not see the directory.
            CheckpointFailedError: a rank could not read the checkpoint.
        """
        self._refuse_unshared()
        unfinished = self._on_rank_0(
            lambda: [str(path) for path in self._directory.partial()],
            lambda found: [str(path) for path in found],
        )
        for left in unfinished:
            self._report({"event": "note", "message": f"ignoring {left}, which was never finished"})
        newest = self._on_rank_0(self._newest, _path_and_record)
        if newest is None:
            return 0, 0
        path, record = newest
        self._report(
            {
                "event": "resume",
                "step": record.step,
                "steps": self._job.steps,
                "path": str(path),
                "layout": record.layout.key,
            }
        )
        from layout_tuner.workers.trainer.job.checkpoint import load_state

        load_state(self._training, path)
        self._restore_counts(record)
        self._first_step, self._first_sample = record.step, record.samples
        return record.step, record.samples

    def _newest(self) -> Any:
        newest = self._job.newest_checkpoint()
        return newest and [str(newest[0]), newest[1].to_mapping()]

    def _restore_counts(self, record: CheckpointRecord) -> None:
        optimizer = self._training.optimizer
        for steps in optimizer.steps:
            steps.fill_(record.optimizer_steps)
        if optimizer.scaler is not None and record.loss_scaler is not None:
            optimizer.scaler.scale = float(record.loss_scaler["scale"])
            optimizer.scaler.good_steps = int(record.loss_scaler["good_steps"])

    def save_if_due(self, step: int) -> None:
        """Saves after every `settings.every` steps, and after the job's last step.

        Communicates: broadcasts from rank 0 over all ranks, and what `save_state` does.

        Raises:
            CheckpointFailedError: on every rank, if any rank could not write. Earlier checkpoints
                stay as they are.
        """
        if step % self._settings.every and step != self._job.steps:
            return
        from layout_tuner.workers.trainer.job.checkpoint import save_state

        started = time.perf_counter()
        folder = self._on_rank_0(lambda: str(self._directory.begin(step)), Path)
        save_state(self._training, folder)
        path = self._on_rank_0(lambda: str(self._finish(folder, step)), Path)
        self._report(
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
        """Raises CheckpointInvalidError on a rank that does not see a file of rank 0."""
        mark = self._on_rank_0(lambda: str(self._directory.mark()), Path)
        seen = mark.exists()
        barrier(self._training.device)
        self._on_rank_0(lambda: mark.unlink(), lambda _: None)
        if not seen:
            raise CheckpointInvalidError(
                f"rank {self._training.mesh.rank} on {socket.gethostname()} does not see the "
                f"checkpoint directory {self._settings.directory} of rank 0; "
                "name one that all nodes share"
            )

    def _on_rank_0(self, act: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """Runs `act` on rank 0 and returns its result on all ranks; a failure is raised on all.

        Communicates: a broadcast from rank 0 over all ranks.
        """
        answer: dict[str, Any] = {}
        if self._is_first:
            try:
                answer = {"found": act()}
            except CheckpointInvalidError as error:
                answer = {"invalid": str(error)}
            except OSError as error:
                answer = {
                    "failed": f"no checkpoint can be written to {self._settings.directory}: "
                    f"{why_unreadable(error)}"
                }
        if self._training.mesh.layout.num_devices > 1:
            answer = broadcast_document(answer, source=0, device=self._training.device)
        with reading_from(0):
            invalid, failed = (answer.get(name) for name in ("invalid", "failed"))
            if invalid is None and failed is None:
                return read(answer["found"])
        if invalid is not None:
            raise CheckpointInvalidError(str(invalid))
        raise CheckpointFailedError(str(failed))


def _path_and_record(found: Any) -> tuple[Path, CheckpointRecord] | None:
    if found is None:
        return None
    path, record = found
    return Path(path), CheckpointRecord.from_mapping(record)
