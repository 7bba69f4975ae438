"""The directory of a job's checkpoints, and the record of each checkpoint. Needs no torch.

A checkpoint is a folder `step-00000500`. While it is written its name is `step-00000500.partial`.
The rename makes it valid.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from layout_tuner.documents.reading import (
    MAX_WIDTH,
    is_positive_number,
    shown,
    whole_number_problem,
)
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.errors import CheckpointInvalidError
from layout_tuner.workers.trainer.job.fields import fields_of_version

FORMAT: Final = "layout-tuner/checkpoint"
VERSION: Final = 1
RECORD_NAME: Final = "checkpoint.json"
INDEX_NAME: Final = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""

_MOST: Final = 1 << 62
"""Bound of counts in a record: more samples than any job takes, within numpy's 64 bits."""
_WHOLE: Final = re.compile(r"step-(\d{8,})")
_PARTIAL: Final = re.compile(r"step-\d{8,}\.partial")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Where and how often a job saves; CheckpointInvalidError for a field out of range."""

    directory: str
    """Folder of the job's checkpoints, on a file system that all nodes share."""
    every: int = 500
    """Steps from one checkpoint to the next. The last step is always saved."""
    keep: int | None = None
    """How many of the newest checkpoints are kept; None: all."""

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str) or not self.directory or "\0" in self.directory:
            raise CheckpointInvalidError(
                f"directory={shown(self.directory)} is not a folder's path"
            )
        for name in ("every", "keep"):
            value = getattr(self, name)
            if name == "keep" and value is None:
                continue
            if problem := whole_number_problem(value, low=1, high=MAX_WIDTH):
                raise CheckpointInvalidError(f"{name}={problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """What a checkpoint contains besides its tensors; stored as `checkpoint.json`."""

    step: int
    """Number of steps taken, which is the index of the next step."""
    samples: int
    model: ModelShape
    seed: int
    layout: Layout
    """The layout that saved it. Any layout can load it."""
    tokens: Mapping[str, Any] | None = None
    """Number and type of the token file's tokens; None: the tokens were synthetic."""
    optimizer_steps: int = 0
    """Updates of the weights: all steps except those that loss scaling skipped."""
    loss_scaler: Mapping[str, Any] | None = None
    """Scale and good steps of fp16's loss scaling; None without loss scaling."""

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        values = asdict(self) | {
            "layout": self.layout.to_mapping(),
            "model": self.model.to_mapping(),
        }
        return {"format": FORMAT, "version": VERSION, **values}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back; CheckpointInvalidError for another version or a wrong field."""
        values = fields_of_version(mapping, FORMAT, VERSION, CheckpointInvalidError)
        try:
            values["model"] = ModelShape.from_mapping(values["model"])
            values["layout"] = Layout.from_mapping(values["layout"])
            record = cls(**values)
        except (SearchSpaceError, KeyError, TypeError) as error:
            raise CheckpointInvalidError(f"its fields are not readable: {error}") from error
        record._refuse_unreadable()
        return record

    def _refuse_unreadable(self) -> None:
        numbers: dict[str, object] = {
            name: getattr(self, name) for name in ("step", "samples", "seed", "optimizer_steps")
        }
        for name in ("tokens", "loss_scaler"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise CheckpointInvalidError(f"{name}={shown(value)} is not an object of fields")
        if self.tokens is not None:
            numbers["tokens.number"] = self.tokens.get("number")
        if self.loss_scaler is not None:
            numbers["loss_scaler.good_steps"] = self.loss_scaler.get("good_steps")
            scale = self.loss_scaler.get("scale")
            if not is_positive_number(scale):
                raise CheckpointInvalidError(
                    f"loss_scaler.scale={shown(scale)} is not a number over 0"
                )
        for name, number in numbers.items():
            if problem := whole_number_problem(number, low=0, high=_MOST):
                raise CheckpointInvalidError(f"{name}={problem}")

    def refuse_other_job(
        self, path: Path, *, model: ModelShape, seed: int, tokens: Mapping[str, Any] | None
    ) -> None:
        """Raises CheckpointInvalidError with the differences if another job saved it."""
        differences = [
            f"{field.name}={getattr(self.model, field.name)!r}, and the job has "
            f"{getattr(model, field.name)!r}"
            for field in fields(ModelShape)
            if getattr(replace(self.model, name=model.name), field.name)
            != getattr(model, field.name)
        ]
        if self.seed != seed:
            differences.append(f"seed={self.seed}, and the job has {seed}")
        if self.tokens != tokens:
            differences.append(
                f"tokens of {_described(self.tokens)}, and the job {_described(tokens)}"
            )
        if differences:
            raise CheckpointInvalidError(
                f"the checkpoint {path} belongs to another job: {'; '.join(differences)}; name "
                "another directory, or resume the job that saved it"
            )


class CheckpointDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def whole(self) -> list[Path]:
        """The complete checkpoints, oldest first; CheckpointInvalidError if unreadable."""
        return sorted(self._named(_WHOLE), key=lambda path: int(path.name.partition("-")[2]))

    def partial(self) -> list[Path]:
        """Checkpoints that were never finished, or are being removed."""
        return self._named(_PARTIAL)

    def newest(self) -> tuple[Path, CheckpointRecord] | None:
        """The newest complete checkpoint and record, or None; CheckpointInvalidError if damaged."""
        if not (whole := self.whole()):
            return None
        path = whole[-1]
        try:
            mapping = json.loads((path / RECORD_NAME).read_text())
            if not (path / INDEX_NAME).is_file():
                raise CheckpointInvalidError(f"its {INDEX_NAME} is missing")
            if not isinstance(mapping, dict):
                raise CheckpointInvalidError(f"its {RECORD_NAME} is no object")
            return path, CheckpointRecord.from_mapping(mapping)
        except (OSError, ValueError, CheckpointInvalidError) as error:
            raise CheckpointInvalidError(
                f"the checkpoint {path} can't be used: {error}; remove it to go on from an "
                "earlier one"
            ) from error

    def mark(self) -> Path:
        """Makes the directory, and a file to be removed; CheckpointInvalidError if it can't."""
        mark = self.path / f".writable-{socket.gethostname()}-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise CheckpointInvalidError(
                f"no checkpoint can be written to {self.path}: {error.strerror or error}"
            ) from error
        return mark

    def begin(self, step: int) -> Path:
        """Makes the folder of a new checkpoint, and removes unfinished ones."""
        for left in self.partial():
            shutil.rmtree(left)
        folder = self.path / f"step-{step:08d}.partial"
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, record: CheckpointRecord) -> Path:
        """Completes a checkpoint whose tensors are on disk; returns its folder."""
        with (folder / RECORD_NAME).open("w") as stream:
            json.dump(record.to_mapping(), stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())
        _sync(folder)
        whole = folder.with_suffix("")
        folder.rename(whole)
        _sync(self.path)
        return whole

    def prune(self, keep: int | None) -> None:
        """Removes all but the newest complete checkpoints.

        Each is renamed first, so that a partly removed one is never taken for complete.
        """
        for path in self.whole()[: -keep if keep is not None else 0]:
            shutil.rmtree(path.rename(path.with_suffix(".partial")))

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            found = list(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointInvalidError(
                f"the checkpoint directory {self.path} can't be read: {error.strerror or error}"
            ) from error
        return [path for path in found if pattern.fullmatch(path.name)]


def _described(tokens: Mapping[str, Any] | None) -> str:
    return "synthetic ones" if tokens is None else f"{tokens['number']} of {tokens.get('dtype')}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
