"""The global batch of a campaign: fixed, or between two bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from layout_tuner.documents.reading import read_mapping, refuse_unknown, shown, whole_number_problem
from layout_tuner.errors import SpaceInvalidError


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """Sequences per step over all replicas; SpaceInvalidError if out of range or crossed."""

    minimum: int
    maximum: int
    """The largest allowed batch; equal to the smallest where the batch is fixed."""

    def __post_init__(self) -> None:
        for name, value in (("min", self.minimum), ("max", self.maximum)):
            if problem := whole_number_problem(value):
                what = problem if self.is_fixed else f"{name}={problem}"
                raise SpaceInvalidError(what, field="global_batch_size")
        if self.minimum > self.maximum:
            raise SpaceInvalidError(
                f"min={self.minimum} is more than max={self.maximum}", field="global_batch_size"
            )

    @property
    def is_fixed(self) -> bool:
        """Whether only one size is allowed."""
        return self.minimum == self.maximum

    @classmethod
    def read(cls, value: int | Mapping[str, Any]) -> Self:
        """Reads a whole number, or `{min:, max:}`; the default of min is 1."""
        if not isinstance(value, Mapping):
            if problem := whole_number_problem(value):
                raise SpaceInvalidError(
                    f"{problem}, nor a mapping {{min:, max:}}", field="global_batch_size"
                )
            return cls(minimum=value, maximum=value)
        try:
            bounds = read_mapping(value, SpaceInvalidError, "the bounds")
            refuse_unknown(bounds, ("min", "max"), SpaceInvalidError, "bound")
        except SpaceInvalidError as error:
            raise error.within("global_batch_size") from error
        if "max" not in bounds:
            raise SpaceInvalidError(
                f"{shown(dict(value))} has no max; tokens/s grow with the batch, so it needs one",
                field="global_batch_size",
            )
        return cls(minimum=bounds.get("min", 1), maximum=bounds["max"])

    def to_value(self) -> int | dict[str, int]:
        """What `read` reads."""
        if self.is_fixed:
            return self.minimum
        return {"min": self.minimum, "max": self.maximum}
