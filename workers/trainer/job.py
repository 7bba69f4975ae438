"""A training job: the document that an export writes and `workers.trainer.train` runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from search_spaces.errors import SearchSpaceError
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.reading import MAX_WIDTH, is_positive_number, shown, whole_number_problem
from workers.trainer.errors import TrainJobInvalidError

FORMAT: Final = "layout-tuner/trainer"
VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """Everything that a training run needs to know, the same on every rank.

    Raises:
        TrainJobInvalidError: at construction, when a number is out of range.
    """

    model: ModelShape
    """What is trained."""
    layout: Layout
    """How it is laid out."""
    seed: int = 0
    """Initial weights and tokens follow from it, the same under every layout."""
    steps: int = 20
    """Optimizer steps, warm-up included."""
    warmup: int = 2
    """First steps that do not count for tokens/s."""
    learning_rate: float = 1e-3
    """AdamW's step size."""
    weight_decay: float = 0.01
    """AdamW's decoupled decay."""
    clip_grad_norm: float | None = None
    """Largest norm of the global gradient; None: no clipping, as in a probe."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("seed", 0)):
            problem = whole_number_problem(getattr(self, name), low=least, high=MAX_WIDTH)
            if problem:
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

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            TrainJobInvalidError: it is of another format or version, or a field is missing,
                unknown, or out of range.
        """
        values = dict(mapping)
        found = (values.pop("format", None), values.pop("version", None))
        if found != (FORMAT, VERSION):
            raise TrainJobInvalidError(
                f"format={found[0]!r} version={found[1]!r} is not {FORMAT!r} version {VERSION}"
            )
        known = tuple(field.name for field in fields(cls))
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise TrainJobInvalidError(
                f"unknown job field {unknown[0]!r}; the fields are {', '.join(known)}"
            )
        for name, kind in (("model", ModelShape), ("layout", Layout)):
            if not isinstance(values.get(name), Mapping):
                raise TrainJobInvalidError(f"the job's {name} is missing or not a mapping")
            try:
                values[name] = kind.from_mapping(values[name])
            except (SearchSpaceError, TypeError) as error:
                raise TrainJobInvalidError(f"the job's {name} is invalid: {error}") from error
        return cls(**values)


def read_job(path: Path, *, steps: int | None = None, warmup: int | None = None) -> TrainJob:
    """Reads a job file, with other steps or another warm-up where they are given.

    Raises:
        TrainJobInvalidError: it cannot be read, or is malformed; the message names the file.
    """
    try:
        mapping = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise TrainJobInvalidError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(mapping, dict):
        raise TrainJobInvalidError(
            f"{path} holds {shown(mapping)} where an object of the job's fields should be"
        )
    given = {"steps": steps, "warmup": warmup}
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        return TrainJob.from_mapping({**mapping, **changes})
    except TrainJobInvalidError as error:
        raise TrainJobInvalidError(f"{path}: {error}") from error


def _refuse_unless_finite(name: str, value: object, *, allow_zero: bool) -> None:
    is_zero = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
    if not is_positive_number(value) and not (allow_zero and is_zero):
        bound = "of at least 0, and finite" if allow_zero else "over 0, and finite"
        raise TrainJobInvalidError(f"{name}={shown(value)} is not a number {bound}")
