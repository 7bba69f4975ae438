"""The directory of a job's checkpoints: which are whole, and what each is of. Needs no torch.

A checkpoint is a folder `step-00000500`. While it is written it is called
`step-00000500.partial`; the rename is the moment from which it counts.
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

from search_spaces.errors import SearchSpaceError
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.reading import MAX_WIDTH, is_positive_number, shown, whole_number_problem
from workers.trainer.errors import CheckpointInvalidError
from workers.trainer.fields import refuse_unknown_fields

FORMAT: Final = "layout-tuner/checkpoint"
VERSION: Final = 1
RECORD_NAME: Final = "checkpoint.json"
INDEX_NAME: Final = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""

_MOST: Final = 1 << 62
"""More samples than any job takes; numpy counts them in 64 bits."""
_WHOLE: Final = re.compile(r"step-(\d{8,})")
_PARTIAL: Final = re.compile(r"step-\d{8,}\.partial")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Where and how often a job saves.

    Raises:
        CheckpointInvalidError: at construction, when a field is out of range.
    """

    directory: str
    """Folder of the job's checkpoints, which every node sees."""
    every: int = 500
    """Steps from one checkpoint to the next; the last step is always saved."""
    keep: int | None = None
    """How many of the newest stay; None: all."""

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

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the settings from their fields by name.

        Raises:
            CheckpointInvalidError: a field is missing, unknown, or out of range.
        """
        refuse_unknown_fields(mapping, cls, CheckpointInvalidError, "field")
        if "directory" not in mapping:
            raise CheckpointInvalidError("directory, the folder of the checkpoints, is missing")
        return cls(**mapping)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """What a checkpoint is of, beside its tensors; kept as `checkpoint.json`."""

    step: int
    """Steps that had been taken: the number of the next one."""
    samples: int
    """Samples that they took."""
    model: ModelShape
    seed: int
    layout: Layout
    """That it was saved under; it may be loaded under any."""
    tokens: Mapping[str, Any] | None = None
    """Number and type of the token file's tokens; None: they were synthetic."""
    optimizer_steps: int = 0
    """Updates of the weights: steps less those that loss scaling skipped."""
    loss_scaler: Mapping[str, Any] | None = None
    """Scale and good steps of fp16's loss scaling, where there was any."""

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            CheckpointInvalidError: it is of another format or version, or a field is missing or
                of the wrong type.
        """
        values = dict(mapping)
        found = (values.pop("format", None), values.pop("version", None))
        if found != (FORMAT, VERSION):
            raise CheckpointInvalidError(
                f"format={found[0]!r} version={found[1]!r} is not {FORMAT!r} version {VERSION}"
            )
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
        """Raises CheckpointInvalidError, naming what differs, if it is not of such a job."""
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
                f"the checkpoint {path} is of another job: {'; '.join(differences)}; name another "
                "directory, or go on with the job that it is of"
            )


class CheckpointDirectory:
    """The folder that a job's checkpoints are in."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def whole(self) -> list[Path]:
        """The checkpoints that are whole, oldest first.

        Raises:
            CheckpointInvalidError: the directory can't be read.
        """
        return sorted(self._named(_WHOLE), key=lambda path: int(path.name.partition("-")[2]))

    def partial(self) -> list[Path]:
        """Those that were never finished, or are being removed."""
        return self._named(_PARTIAL)

    def newest(self) -> tuple[Path, CheckpointRecord] | None:
        """The newest whole checkpoint, and what it is of.

        Raises:
            CheckpointInvalidError: it can't be read.
        """
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
        """Writes an empty file there, for others to see and for the caller to remove.

        Raises:
            CheckpointInvalidError: nothing can be written there.
        """
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
        """Makes the folder of a checkpoint to be; what was left of others is removed."""
        for left in self.partial():
            shutil.rmtree(left)
        folder = self.path / f"step-{step:08d}.partial"
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, record: CheckpointRecord) -> Path:
        """Makes a checkpoint count whose tensors are on disk; returns its folder."""
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
        """Removes all whole checkpoints but the newest; a half-removed one never counts as whole."""
        for path in self.whole()[: -keep if keep is not None else 0]:
            doomed = path.rename(path.with_suffix(".partial"))
            shutil.rmtree(doomed)

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
