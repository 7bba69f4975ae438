"""The layout: one complete way to run a training job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, get_args

from search_spaces.errors import LayoutInvalidError

Recompute = Literal["none", "selective", "full"]
"""What is recomputed in the backward pass instead of being kept."""

Precision = Literal["fp32", "bf16", "fp16"]
"""The type of the matrix multiplications; master weights and optimizer states are always fp32."""

RECOMPUTE_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A complete parallel layout: every rank of the job can be derived from it.

    Raises:
        LayoutInvalidError: at construction, when a field is out of its range. Whether the layout
            suits a model and a cluster is for `search_spaces.rules` to say.
    """

    num_nodes: int = 1
    """Nodes that the job occupies."""
    tp: int = 1
    """Tensor-parallel degree: ranks that share each weight matrix."""
    pp: int = 1
    """Pipeline-parallel degree: stages that the layers are cut into."""
    dp: int = 1
    """Data-parallel degree: replicas of the model."""
    vpp: int = 1
    """Virtual stages a pipeline rank (interleaved schedule); 1 is plain 1F1B."""
    micro_batch_size: int = 1
    """Sequences that go through the model at once, on each replica."""
    num_microbatches: int = 1
    """Micro-batches that each replica accumulates before a step (the Frontier paper's GAS)."""
    zero_stage: int = 0
    """0: every replica holds the optimizer states; 1: they are sharded over dp."""
    recompute: Recompute = "none"
    """Activations that are recomputed in the backward pass."""
    sequence_parallel: bool = False
    """Whether the tensor-parallel ranks also share the sequence outside the matrix multiplications."""
    precision: Precision = "fp32"
    """Type of the matrix multiplications."""

    def __post_init__(self) -> None:
        for name in COUNT_KNOBS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutInvalidError(f"{name}={value!r} is not a whole number of at least 1")
        if isinstance(self.zero_stage, bool) or self.zero_stage not in (0, 1):
            raise LayoutInvalidError(f"zero_stage={self.zero_stage!r} is not one of 0, 1")
        if self.recompute not in RECOMPUTE_MODES:
            raise LayoutInvalidError(
                f"recompute={self.recompute!r} is not one of {', '.join(RECOMPUTE_MODES)}"
            )
        if not isinstance(self.sequence_parallel, bool):
            raise LayoutInvalidError(
                f"sequence_parallel={self.sequence_parallel!r} is not true or false"
            )
        if self.precision not in PRECISIONS:
            raise LayoutInvalidError(
                f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}"
            )

    @property
    def num_devices(self) -> int:
        """Ranks of the job, one a device: tp * pp * dp."""
        return self.tp * self.pp * self.dp

    @property
    def global_batch_size(self) -> int:
        """Sequences a step, over all replicas: dp * micro_batch_size * num_microbatches."""
        return self.dp * self.micro_batch_size * self.num_microbatches

    @property
    def key(self) -> str:
        """The canonical name of the layout: equal layouts, and only those, have equal keys."""
        return (
            f"n{self.num_nodes}-tp{self.tp}-pp{self.pp}-dp{self.dp}-vpp{self.vpp}"
            f"-mbs{self.micro_batch_size}-mb{self.num_microbatches}-z{self.zero_stage}"
            f"-rc_{self.recompute}-sp{int(self.sequence_parallel)}-{self.precision}"
        )

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a layout from its fields by name.

        Raises:
            LayoutInvalidError: a name is unknown, or a value is out of range.
        """
        known = tuple(field.name for field in fields(cls))
        unknown = sorted(set(mapping) - set(known))
        if unknown:
            raise LayoutInvalidError(
                f"unknown layout field {unknown[0]!r}; the fields are {', '.join(known)}"
            )
        return cls(**mapping)


COUNT_KNOBS: Final = (
    "num_nodes",
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "num_microbatches",
)
"""Layout fields that are whole numbers of at least 1."""

LAYOUT_FIELDS: Final = tuple(field.name for field in fields(Layout))
"""Every layout field, in the canonical order."""
