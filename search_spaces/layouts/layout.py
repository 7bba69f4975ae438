"""The layout: one complete way to run a training job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self, get_args

from layout_tuner.documents.reading import read_mapping, refuse_unknown, shown
from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.layouts.knobs import knob, knobs_of
from layout_tuner.search_spaces.layouts.pipeline_layout import (
    SPLIT,
    canonical_layout,
    layout_key,
    layout_of_key,
    stage_layers,
)
from layout_tuner.search_spaces.layouts.recomputation import (
    ALL_LAYERS,
    RECOMPUTE_CHOICES,
    layers_by_rank,
    read_recompute,
    read_recompute_layers,
)
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS, Schedule, stage_of

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4"]
"""The type of the matrix multiplications; master weights are always fp32. With 8 bits or fewer
(`narrow_formats`), activations, attention, routers and the output projection are bf16, as in
Megatron-LM."""

PipelineSplit = Literal["layers", "embedding", "head", "embedding_and_head"]
"""What counts as a layer in the split over pipeline stages, besides the transformer layers."""

RankOrder = Literal["tp_cp_dp_pp", "tp_cp_pp_dp"]
"""The axes by how far apart their ranks are, neighbours first."""

RANK_ORDERS: Final[tuple[RankOrder, ...]] = get_args(RankOrder)
SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)
PIPELINE_SPLITS: Final[tuple[PipelineSplit, ...]] = get_args(PipelineSplit)
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
ZERO_STAGES: Final = (0, 1, 2, 3)

CpCommType = Literal["all_gather", "p2p", "a2a"]
"""How attention exchanges tokens over cp: it gathers keys and values, passes them around a ring, or
exchanges tokens for heads."""

CP_COMM_TYPES: Final[tuple[CpCommType, ...]] = get_args(CpCommType)

Offload = Literal["none", "activations", "optimizer"]
"""What is kept in the memory of the host."""

OptimizerStates = Literal["fp32", "bf16"]
"""The type in which the optimizer keeps its two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A complete parallel layout: every rank of the job can be derived from it.

    Raises:
        LayoutInvalidError: at construction, when a field is out of its range. Whether the layout
            suits a model and a cluster is for `search_spaces.legality_rules` to say.
    """

    num_nodes: int = knob(1, "nodes", "nodes", heading="nodes", table_column="derived")
    """Nodes that the job occupies."""
    tp: int = knob(
        1,
        "tensor parallel, tp",
        "tp",
        "Tensor-parallel ranks.",
        heading="tp",
        table_column="stated",
    )
    """Tensor-parallel degree: ranks that share each weight matrix."""
    tp_columns: int = knob(
        1,
        "tensor columns",
        "columns",
        "Ranks that divide the other side of each weight matrix.",
        is_new=True,
    )
    """Tensor columns: ranks that divide the side of each weight matrix that tp does not, and the
    features of the residual stream; a matrix has tp * tp_columns blocks (arXiv:2305.13525)."""
    cp: int = knob(1, "context parallel, cp", "cp", "Context-parallel ranks.", is_new=True)
    """Context-parallel degree: ranks that share each sequence."""
    pp: int = knob(
        1, "pipeline parallel, pp", "pp", "Pipeline stages.", heading="pp", table_column="stated"
    )
    """Pipeline-parallel degree: stages that the layers are cut into."""
    dp: int = knob(
        1, "data parallel, dp", "dp", "Data-parallel replicas.", heading="dp", table_column="stated"
    )
    """Data-parallel degree: replicas of the model."""
    ep: int = knob(
        1, "expert parallel, ep", "ep", "Ranks that divide the experts of a layer.", is_new=True
    )
    """Expert-parallel degree: ranks that each hold some of a layer's experts."""
    etp: int = knob(
        1,
        "expert tensor parallel, etp",
        "etp",
        "Ranks that share each expert's weights.",
        is_new=True,
    )
    """Expert-tensor-parallel degree: ranks that share each weight matrix of an expert."""
    vpp: int = knob(
        1,
        "virtual stages, vpp",
        "vpp",
        "Virtual stages a pipeline rank.",
        table_column="may_be_empty",
    )
    """Virtual stages a pipeline rank; more than 1 interleave the 1F1B schedule."""
    schedule: Schedule = knob(
        "1f1b",
        "pipeline schedule",
        "schedule",
        "Order of the pipeline's passes.",
        choices=SCHEDULES,
        is_new=True,
    )
    """Order of the pipeline's forward and backward passes."""
    cp_comm_type: CpCommType = knob(
        "all_gather",
        "communication of cp",
        "cp by",
        "How attention exchanges keys and values over cp.",
        choices=CP_COMM_TYPES,
        is_new=True,
    )
    """Communication of attention over cp."""
    pipeline_split: PipelineSplit = knob(
        "layers",
        "pipeline split",
        "split by",
        "Whether the embedding and the head each count as a layer of the pipeline's split.",
        choices=PIPELINE_SPLITS,
        is_new=True,
    )
    """What counts as a layer in the split over stages: `layers` is the transformer layers alone. A
    stage whose embedding or head counts has one transformer layer fewer."""
    pipeline_layout: str = knob(
        SPLIT,
        "pipeline layout",
        "stages",
        "The layers of each stage, such as Et*3|(tt|)*2tL; split: as --pipeline-split says.",
        choices=(SPLIT,),
        parse=canonical_layout,
        is_new=True,
    )
    """The layers of each of pp * vpp stages in Megatron-LM's letters (`pipeline_layout`). A text
    that is the same as a `pipeline_split` becomes that split."""
    rank_order: RankOrder = knob(
        "tp_cp_dp_pp",
        "order of ranks",
        "ranks by",
        "Axes from neighbouring ranks to distant ones; nodes hold neighbours.",
        choices=RANK_ORDERS,
        is_new=True,
    )
    """Order in which ranks are numbered along the axes, the fastest first, after tensor columns.
    With `tp_cp_pp_dp` the stages of a pipeline are neighbours, not the replicas of a stage."""
    micro_batch_size: int = knob(
        1,
        "micro-batch size, mbs",
        "mbs",
        "Sequences at once.",
        heading="mbs",
        table_column="stated",
    )
    """Sequences that go through the model at once, on each replica."""
    num_microbatches: int = knob(
        1,
        "micro-batches a step, mb",
        "mb",
        "Micro-batches a step, of each replica.",
        heading="mb",
        table_column="stated",
    )
    """Micro-batches that each replica accumulates before a step (the Frontier paper's GAS)."""
    zero_stage: int = knob(
        0,
        "ZeRO stage",
        "ZeRO",
        "1: shard the optimizer's states; 2: also the gradients; 3: also the weights (FSDP).",
        choices=ZERO_STAGES,
        heading="zero",
        table_column="may_be_empty",
    )
    """What is sharded over dp * cp: nothing (0), optimizer states (1), gradients too (2), or also
    weights (3), which are gathered for each layer before it computes, as FSDP does."""
    zero_replicas: int = knob(
        1,
        "ZeRO copies",
        "ZeRO copies",
        "Copies of what ZeRO shards; with stage 3 this is HSDP.",
        is_shown=False,
    )
    """Copies of what ZeRO shards: a shard group is dp * cp / zero_replicas neighbouring ranks, and
    the groups hold the same. 1: one group of all dp * cp."""
    recompute: str = knob(
        "none",
        "recomputation",
        "recompute",
        choices=RECOMPUTE_CHOICES,
        parse=read_recompute,
        table_column="stated",
    )
    """Activations that are recomputed in the backward pass: none, selective (core attention), full,
    or modules of a layer (`recomputation.RECOMPUTE_MODULES`) joined by +."""
    recompute_layers: str = knob(
        ALL_LAYERS,
        "layers that recompute",
        "recompute layers",
        "Layers of each stage that recompute: all, a number, or one number for each pipeline rank "
        "as in 8/6/4/0.",
        choices=(ALL_LAYERS,),
        parse=read_recompute_layers,
        is_new=True,
    )
    """Layers that recompute: all, the first so many of each (virtual) stage, or one such number for
    each pipeline rank."""
    offload: Offload = knob(
        "none",
        "offload",
        "offload",
        "What is kept in the memory of the host.",
        choices=get_args(Offload),
        is_new=True,
    )
    """What is kept in the memory of the host instead of the device: activations until the backward
    pass, or the optimizer's states with the step."""
    optimizer_states: OptimizerStates = knob(
        "fp32",
        "optimizer states",
        "optimizer states",
        "Type in which the optimizer keeps its moments; bf16 changes losses.",
        choices=get_args(OptimizerStates),
        is_new=True,
    )
    """Type in which Adam's two moments are kept; the masters stay in fp32."""
    sequence_parallel: bool = knob(
        False,
        "sequence parallel",
        "sequence parallel",
        choices=(False, True),
        table_column="may_be_empty",
    )
    """Whether tensor-parallel ranks also share the sequence outside the matrix multiplications."""
    precision: Precision = knob(
        "fp32",
        "precision",
        "precision",
        "By default the cluster's: bf16 where it states a peak for it, else fp16, else "
        "fp32; fp32 on CPU cores.",
        choices=PRECISIONS,
        heading="precision",
        table_column="stated",
    )
    """Type of the matrix multiplications."""
    job: JobSettings = field(default=NO_SETTINGS)
    """Values of the trainer's own knobs that are not at its defaults (`search_spaces.jobs`). It is
    no layout field: `KNOBS` and `LAYOUT_FIELDS` do not have it."""

    def __post_init__(self) -> None:
        for name, each in KNOBS.items():
            if problem := each.problem(getattr(self, name)):
                raise LayoutInvalidError(f"{name}={problem}")
            if each.parse is not None:
                object.__setattr__(self, name, each.parse(getattr(self, name)))
        if self.is_written_out:
            split = split_of(stage_layers(self.pipeline_layout), self.pp, self.vpp)
            if split is not None and self.pipeline_split in ("layers", split):
                object.__setattr__(self, "pipeline_layout", SPLIT)
                object.__setattr__(self, "pipeline_split", split)
        if not isinstance(self.job, JobSettings):
            raise LayoutInvalidError(f"{shown(self.job)} is not the job's knobs", field="job")

    @property
    def num_devices(self) -> int:
        """Ranks of the job, one a device: tp * tp_columns * cp * pp * dp."""
        return self.tp_ranks * self.cp * self.pp * self.dp

    @property
    def degrees(self) -> dict[str, int]:
        """The factors of `num_devices` by name, without new ones (`Knob.is_new`) that are 1."""
        degrees = {name: getattr(self, name) for name in DEGREES}
        return {
            name: degree for name, degree in degrees.items() if degree > 1 or not KNOBS[name].is_new
        }

    @property
    def tp_ranks(self) -> int:
        """Ranks that hold one copy of a stage's weights: tp * tp_columns."""
        return self.tp * self.tp_columns

    @property
    def dp_cp(self) -> int:
        """Ranks that hold the same weights and sum their gradients: dp * cp."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts: tp * cp * dp / (etp * ep), at least 1."""
        return max(self.tp * self.dp_cp // (self.etp * self.ep), 1)

    @property
    def is_written_out(self) -> bool:
        """Whether `pipeline_layout` says which layers a stage has, and not `pipeline_split`."""
        return self.pipeline_layout != SPLIT

    @property
    def counted_ends(self) -> tuple[int, int]:
        """Layers that the embedding and the head count as in the pipeline's split: 0 or 1 each."""
        split = self.pipeline_split if self.pp > 1 and not self.is_written_out else "layers"
        return int("embedding" in split), int("head" in split)

    def counted_layers(self, num_layers: int) -> int:
        """Layers that are split over the stages, counted embedding and head included."""
        return num_layers + sum(self.counted_ends)

    def layers_of_stage(self, stage: int, num_layers: int) -> range:
        """The transformer layers of one of pp * vpp stages; the first or the last may have none.

        The split is Megatron-LM's (`get_num_layers_to_build`).
        """
        if self.is_written_out:
            layers = stage_layers(self.pipeline_layout)
            begin = sum(layers[:stage])
            return range(begin, begin + layers[stage])
        each = self.counted_layers(num_layers) // (self.pp * self.vpp)
        first = stage * each - self.counted_ends[0]
        return range(max(first, 0), min(first + each, num_layers))

    def recomputing_layers(self, num_layers: int) -> list[int] | None:
        """The layers that recompute what `recompute` says, of so many; None: all."""
        if not (counts := layers_by_rank(self.recompute_layers)):
            return None
        return [
            layer
            for rank in range(self.pp)
            for stage in self.stages_of_rank(rank)
            for layer in self.layers_of_stage(stage, num_layers)[: counts[rank % len(counts)]]
        ]

    @property
    def is_v_shaped(self) -> bool:
        """Whether a rank has two stages in the shape of a V: the first and the last on one rank."""
        return self.schedule in V_SLOTS

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, its chunks in order."""
        return tuple(stage_of(chunk, rank, self.pp, self.schedule) for chunk in range(self.vpp))

    @property
    def zero_group_size(self) -> int:
        """Ranks that share one copy of what ZeRO shards: 1 without ZeRO."""
        return max(self.dp_cp // self.zero_replicas, 1) if self.zero_stage else 1

    @property
    def expert_zero_group_size(self) -> int:
        """The same of what belongs to experts."""
        return max(self.edp // self.zero_replicas, 1) if self.zero_stage else 1

    @property
    def global_batch_size(self) -> int:
        """Sequences a step, over all replicas: dp * micro_batch_size * num_microbatches."""
        return self.dp * self.micro_batch_size * self.num_microbatches

    @property
    def key(self) -> str:
        """The canonical name of the layout: equal layouts, and only those, have equal keys."""
        copies = f"x{self.zero_replicas}" if self.zero_replicas > 1 else ""
        context = f"-cp{self.cp}" if self.cp > 1 else ""
        if self.cp_comm_type != "all_gather":
            context = f"-cp{self.cp}_{self.cp_comm_type}"
        if self.ep > 1 or self.etp > 1:
            context += f"-ep{self.ep}" + (f"x{self.etp}" if self.etp > 1 else "")
        if self.tp_columns > 1:
            context += f"-tc{self.tp_columns}"
        if self.rank_order != "tp_cp_dp_pp":
            context += f"-{self.rank_order}"
        split = "" if self.pipeline_split == "layers" else f"-ps_{self.pipeline_split}"
        if self.is_written_out:
            split += f"-pl_{layout_key(self.pipeline_layout)}"
        schedule = "" if self.schedule == "1f1b" else f"-{self.schedule}"
        numbers = "" if self.recompute_layers == ALL_LAYERS else self.recompute_layers
        levers = f"-rl{numbers}".replace("/", ".") if numbers else ""
        levers += "" if self.offload == "none" else f"-off_{self.offload}"
        levers += "" if self.optimizer_states == "fp32" else f"-os_{self.optimizer_states}"
        return (
            f"n{self.num_nodes}-tp{self.tp}-pp{self.pp}-dp{self.dp}-vpp{self.vpp}{schedule}{split}"
            f"-mbs{self.micro_batch_size}-mb{self.num_microbatches}-z{self.zero_stage}{copies}"
            f"-rc_{self.recompute}{levers}-sp{int(self.sequence_parallel)}-{self.precision}{context}"
            f"{self.job.key}"
        )

    @property
    def without_job(self) -> Self:
        """The layout alone, with all of the trainer's knobs at their defaults."""
        return replace(self, job=NO_SETTINGS) if self.job else self

    @classmethod
    def of_key(cls, key: str) -> Self:
        """The layout of a key. Raises LayoutInvalidError if it is not the key of a layout."""
        layout, tilde, job = key.partition("~")
        found = _KEY.fullmatch(layout)
        if found is None:
            raise LayoutInvalidError(
                f"{shown(key)} is not the key of a layout, such as {cls().key}"
            )
        words: dict[str, Any] = {name: word for name, word in found.groupdict().items() if word}
        words |= {name: int(word) for name, word in words.items() if KNOBS[name].is_number}
        if "recompute_layers" in words:
            words["recompute_layers"] = words["recompute_layers"].replace(".", "/")
        if "pipeline_layout" in words:
            try:
                words["pipeline_layout"] = layout_of_key(words["pipeline_layout"])
            except ValueError as error:
                raise LayoutInvalidError(
                    f"{shown(key)} is not the key of a layout: {error}"
                ) from None
        return cls(
            **words | {"sequence_parallel": words["sequence_parallel"] == "1"},
            job=JobSettings.of_key(tilde + job),
        )

    def to_mapping(self, *, every_knob: bool = False) -> dict[str, Any]:
        """The fields by name, as plain JSON values.

        New knobs at their default are left out (`Knob.is_new`), unless every knob is asked for.
        `job` is there where it has settings.
        """
        mapping = {
            name: getattr(self, name)
            for name in LAYOUT_FIELDS
            if every_knob or not KNOBS[name].is_left_out(getattr(self, name))
        }
        return mapping | {"job": self.job.to_mapping()} if self.job else mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a layout from its fields; LayoutInvalidError if one is unknown or wrong."""
        values = read_mapping(mapping, LayoutInvalidError, "a layout")
        refuse_unknown(values, (*LAYOUT_FIELDS, "job"), LayoutInvalidError, "layout field")
        return cls(**values | {"job": JobSettings.read(values.get("job", {}))})


def split_of_ends(embedding: bool, head: bool) -> PipelineSplit:
    """The split where embedding or head count as layers."""
    return PIPELINE_SPLITS[embedding + 2 * head]


def split_of(
    layers: Sequence[int], pp: int, vpp: int, likely: PipelineSplit = PIPELINE_SPLITS[0]
) -> PipelineSplit | None:
    """The split, first the likely one, by which pp * vpp stages have these layers, or None."""
    stages = pp * vpp
    if len(layers) != stages:
        return None
    for split in (likely, *PIPELINE_SPLITS) if pp > 1 else PIPELINE_SPLITS[:1]:
        ends = int("embedding" in split), int("head" in split)
        each = (sum(layers) + sum(ends)) // stages
        even = [each] * stages
        even[0] -= ends[0]
        even[-1] -= ends[1]
        if [*layers] == even:
            return split
    return None


_KEY: Final = re.compile(
    r"n(?P<num_nodes>\d{1,9})-tp(?P<tp>\d{1,9})-pp(?P<pp>\d{1,9})-dp(?P<dp>\d{1,9})"
    r"-vpp(?P<vpp>\d{1,9})(?:-(?P<schedule>gpipe|zero_bubble|zbv|v_half|v_min))?(?:-ps_(?P<pipeline_split>[a-z_]+))?"
    r"(?:-pl_(?P<pipeline_layout>\d{1,4}(?:x\d{1,4})?(?:\.\d{1,4}(?:x\d{1,4})?)*))?"
    r"-mbs(?P<micro_batch_size>\d{1,9})-mb(?P<num_microbatches>\d{1,9})"
    r"-z(?P<zero_stage>\d)(?:x(?P<zero_replicas>\d{1,9}))?-rc_(?P<recompute>[a-z_+]+)"
    r"(?:-rl(?P<recompute_layers>\d[\d.]*))?(?:-off_(?P<offload>[a-z]+))?"
    r"(?:-os_(?P<optimizer_states>[a-z0-9]+))?"
    r"-sp(?P<sequence_parallel>[01])-(?P<precision>[a-z0-9_]+)"
    r"(?:-cp(?P<cp>\d{1,9})(?:_(?P<cp_comm_type>[a-z0-9_]+))?)?"
    r"(?:-ep(?P<ep>\d{1,9})(?:x(?P<etp>\d{1,9}))?)?(?:-tc(?P<tp_columns>\d{1,9}))?"
    r"(?:-(?P<rank_order>tp_cp_pp_dp))?",
    re.ASCII,
)

KNOBS: Final = knobs_of(Layout)
"""The table of knobs: every layout field by name, in the canonical order."""

LAYOUT_FIELDS: Final = tuple(KNOBS)
"""Every layout field, in the canonical order."""

COUNT_KNOBS: Final = tuple(name for name, each in KNOBS.items() if each.is_count)
"""Layout fields that are whole numbers of at least 1."""

DEGREES: Final = ("tp", "tp_columns", "cp", "pp", "dp")
"""Layout fields whose product is the number of devices."""
