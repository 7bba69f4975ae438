"""The layout: one complete way to run a training job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, get_args

from search_spaces.errors import LayoutInvalidError
from search_spaces.reading import read_mapping, refuse_unknown, shown, whole_number_problem

Recompute = Literal["none", "selective", "full"]
"""What is recomputed in the backward pass instead of being kept."""

Precision = Literal["fp32", "bf16", "fp16"]
"""The type of the matrix multiplications; master weights and optimizer states are always fp32."""

RECOMPUTE_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
ZERO_STAGES: Final = (0, 1)


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
    zero_replicas: int = 1
    """Copies of the sharded optimizer states: a shard group is dp / zero_replicas neighbouring
    data-parallel ranks, and the groups hold the same. 1: one group of all dp."""
    recompute: Recompute = "none"
    """Activations that are recomputed in the backward pass."""
    sequence_parallel: bool = False
    """Whether the tensor-parallel ranks also share the sequence outside the matrix multiplications."""
    precision: Precision = "fp32"
    """Type of the matrix multiplications."""

    def __post_init__(self) -> None:
        for name in COUNT_KNOBS:
            problem = whole_number_problem(getattr(self, name))
            if problem:
                raise LayoutInvalidError(f"{name}={problem}")
        if type(self.zero_stage) is not int or self.zero_stage not in ZERO_STAGES:
            raise LayoutInvalidError(f"zero_stage={shown(self.zero_stage)} is not one of 0, 1")
        if self.recompute not in RECOMPUTE_MODES:
            raise LayoutInvalidError(
                f"recompute={shown(self.recompute)} is not one of {', '.join(RECOMPUTE_MODES)}"
            )
        if not isinstance(self.sequence_parallel, bool):
            raise LayoutInvalidError(
                f"sequence_parallel={shown(self.sequence_parallel)} is not true or false"
            )
        if self.precision not in PRECISIONS:
            raise LayoutInvalidError(
                f"precision={shown(self.precision)} is not one of {', '.join(PRECISIONS)}"
            )

    @property
    def num_devices(self) -> int:
        """Ranks of the job, one a device: tp * pp * dp."""
        return self.tp * self.pp * self.dp

    @property
    def zero_group_size(self) -> int:
        """Ranks that share one copy of the optimizer states: 1 without ZeRO."""
        return max(self.dp // self.zero_replicas, 1) if self.zero_stage == 1 else 1

    @property
    def global_batch_size(self) -> int:
        """Sequences a step, over all replicas: dp * micro_batch_size * num_microbatches."""
        return self.dp * self.micro_batch_size * self.num_microbatches

    @property
    def key(self) -> str:
        """The canonical name of the layout: equal layouts, and only those, have equal keys."""
        copies = f"x{self.zero_replicas}" if self.zero_replicas > 1 else ""
        return (
            f"n{self.num_nodes}-tp{self.tp}-pp{self.pp}-dp{self.dp}-vpp{self.vpp}"
            f"-mbs{self.micro_batch_size}-mb{self.num_microbatches}-z{self.zero_stage}{copies}"
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
        values = read_mapping(mapping, LayoutInvalidError, "a layout")
        refuse_unknown(values, LAYOUT_FIELDS, LayoutInvalidError, "layout field")
        return cls(**values)


COUNT_KNOBS: Final = (
    "num_nodes",
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "num_microbatches",
    "zero_replicas",
)
"""Layout fields that are whole numbers of at least 1."""

LAYOUT_FIELDS: Final = tuple(field.name for field in fields(Layout))
"""Every layout field, in the canonical order."""
