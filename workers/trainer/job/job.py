"""A training job: the document that an export writes and `train` runs.

Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from layout_tuner.documents.reading import (
    MAX_WIDTH,
    is_positive_number,
    shown,
    whole_number_problem,
    why_unreadable,
)
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.embedded import JOB_FORMAT, JOB_VERSION
from layout_tuner.workers.trainer.errors import (
    TrainerError,
    TrainerOptionInvalidError,
    TrainJobInvalidError,
)
from layout_tuner.workers.trainer.job.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointRecord,
    CheckpointSettings,
)
from layout_tuner.workers.trainer.job.fields import fields_of_version, refuse_unknown_fields
from layout_tuner.workers.trainer.job.training_tokens import TokenFile, TokenFileSettings
from layout_tuner.workers.trainer.trainer_options import TrainerOptions

_PARTS: Final[Mapping[str, tuple[type[Any], str, str]]] = {
    "data": (TokenFileSettings, "tokens", "the path of the file"),
    "checkpoint": (CheckpointSettings, "directory", "the folder of the checkpoints"),
}
"""Parts of the document: their settings, and the path that they must have, with its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """The settings of a training job, alike on every rank; TrainJobInvalidError if out of range."""

    model: ModelShape
    layout: Layout
    seed: int = 0
    """Seed of initial weights and tokens, which are the same in every layout."""
    steps: int = 20
    """Optimizer steps, warm-up included."""
    warmup: int = 2
    """Number of first steps that do not count for tokens/s."""
    learning_rate: float = 1e-3
    """AdamW's learning rate."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    clip_grad_norm: float | None = None
    """Largest norm of the global gradient; None: no clipping, as in a probe."""
    compile: bool = False
    """Whether torch.compile compiles the arithmetic between the matrix products."""
    data: TokenFileSettings | None = None
    """The token file; None: synthetic tokens, as in a probe."""
    checkpoint: CheckpointSettings | None = None
    """Where and how often to save checkpoints; None: never."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("seed", 0)):
            if problem := whole_number_problem(getattr(self, name), low=least, high=MAX_WIDTH):
                raise TrainJobInvalidError(f"{name}={problem}")
        if self.warmup >= self.steps:
            raise TrainJobInvalidError(
                f"warmup={self.warmup} leaves none of steps={self.steps} to be timed; "
                "lower it, or take more steps"
            )
        for name in ("learning_rate", "weight_decay"):
            _refuse_unless_finite(name, getattr(self, name), allow_zero=True)
        if self.clip_grad_norm is not None:
            _refuse_unless_finite("clip_grad_norm", self.clip_grad_norm, allow_zero=False)
        if not isinstance(self.compile, bool):
            raise TrainJobInvalidError(f"compile={shown(self.compile)} is not true or false")
        _ = self.options

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        values = asdict(self) | {
            "layout": self.layout.to_mapping(),
            "model": self.model.to_mapping(),
        }
        return {"format": JOB_FORMAT, "version": JOB_VERSION, **values}

    @property
    def options(self) -> TrainerOptions:
        """The knobs of the job, with its switch `compile`."""
        try:
            return TrainerOptions.from_knobs(self.layout.job, compiled=self.compile)
        except TrainerOptionInvalidError as error:
            raise TrainJobInvalidError(str(error)) from error

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back; TrainJobInvalidError for another version or a wrong field."""
        values = fields_of_version(mapping, JOB_FORMAT, JOB_VERSION, TrainJobInvalidError)
        refuse_unknown_fields(values, cls, "job field")
        for name, kind in (("model", ModelShape), ("layout", Layout)):
            if not isinstance(values.get(name), Mapping):
                raise TrainJobInvalidError(f"the job's {name} is missing or not a mapping")
            try:
                values[name] = kind.from_mapping(values[name])
            except (SearchSpaceError, TypeError) as error:
                raise TrainJobInvalidError(f"the job's {name} is invalid: {error}") from error
        parts = {name: _read_part(name, values.get(name)) for name in _PARTS}
        return cls(**values | parts)

    def refuse_unusable(self) -> None:
        """Checks the files that the job names, before any rank is started.

        Raises:
            TrainingTokensInvalidError: the token file can't be trained on.
            CheckpointInvalidError: no checkpoint can be written, or the newest one can't be used.
        """
        self.open_token_file()
        if self.checkpoint is not None:
            CheckpointDirectory(self.checkpoint.directory).mark().unlink(missing_ok=True)
            self.newest_checkpoint()

    def newest_checkpoint(self) -> tuple[Path, CheckpointRecord] | None:
        """The newest checkpoint, from which it resumes; CheckpointInvalidError if unusable."""
        if self.checkpoint is None:
            return None
        newest = CheckpointDirectory(self.checkpoint.directory).newest()
        if newest is not None:
            path, record = newest
            record.refuse_other_job(
                path, model=self.model, seed=self.seed, tokens=self.describe_tokens()
            )
        return newest

    def describe_tokens(self) -> dict[str, Any] | None:
        """The description of the token file in a checkpoint; None: the tokens are synthetic."""
        file = self.open_token_file()
        return None if file is None else file.describe()

    def open_token_file(self, *, first_step: int = 0, first_sample: int = 0) -> TokenFile | None:
        """The job's token file, for steps from `first_step` on; None: the tokens are synthetic.

        `first_sample` samples were used before that step.

        Raises:
            TrainingTokensInvalidError: the file can't be trained on.
        """
        if self.data is None:
            return None
        return TokenFile(
            self.data,
            self.model,
            seed=self.seed,
            global_batch_size=self.layout.global_batch_size,
            first_step=first_step,
            first_sample=first_sample,
        )


def read_job(path: Path, *, steps: int | None = None, warmup: int | None = None) -> TrainJob:
    """Reads a job file, with other `steps` and `warmup` if given; TrainJobInvalidError names it."""
    try:
        mapping = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise TrainJobInvalidError(
            f"{path} is not a readable JSON file: {why_unreadable(error)}"
        ) from error
    if not isinstance(mapping, dict):
        raise TrainJobInvalidError(
            f"{path} holds {shown(mapping)} where an object of the job's fields should be"
        )
    _make_absolute(mapping, path.absolute().parent)
    given = {"steps": steps, "warmup": warmup}
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        return TrainJob.from_mapping({**mapping, **changes})
    except TrainJobInvalidError as error:
        raise TrainJobInvalidError(f"{path}: {error}") from error


def _read_part(name: str, value: object) -> Any:
    kind, path, meaning = _PARTS[name]
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TrainJobInvalidError(f"the job's {name}={shown(value)} is not an object of fields")
    try:
        refuse_unknown_fields(value, kind, "field")
        if path not in value:
            raise TrainJobInvalidError(f"{path}, {meaning}, is missing")
        return kind(**value)
    except TrainerError as error:
        raise TrainJobInvalidError(f"the job's {name} is invalid: {error}") from error


def _make_absolute(mapping: dict[str, Any], folder: Path) -> None:
    """Makes the document's paths relative to its own folder, not to the working directory."""
    for part, (_, name, _) in _PARTS.items():
        fields_of_part = mapping.get(part)
        if isinstance(fields_of_part, dict) and isinstance(fields_of_part.get(name), str):
            path = str(folder / fields_of_part[name])
            mapping[part] = {**fields_of_part, name: path}


def _refuse_unless_finite(name: str, value: object, *, allow_zero: bool) -> None:
    is_zero = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
    if not is_positive_number(value) and not (allow_zero and is_zero):
        bound = "of at least 0, and finite" if allow_zero else "over 0, and finite"
        raise TrainJobInvalidError(f"{name}={shown(value)} is not a number {bound}")
