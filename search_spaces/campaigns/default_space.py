"""The choices of the knobs that a campaign's document leaves out: every sensible layout.

The rules are stated for users in docs/reference/campaign-file.md. A knob that the document states
is never changed. The result is explicit, so that a stored campaign keeps its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from layout_tuner.documents.reading import read_mapping
from layout_tuner.errors import SearchSpaceError, SpaceInvalidError
from layout_tuner.predictions.estimates.balanced_stages import balanced_stages
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.global_batch import GlobalBatch
from layout_tuner.search_spaces.layouts.knobs import read_choices
from layout_tuner.search_spaces.layouts.layout import (
    CP_COMM_TYPES,
    KNOBS,
    PIPELINE_SPLITS,
    ZERO_STAGES,
    CpCommType,
    Layout,
    split_of,
)
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.pipeline_layout import (
    MAX_TEXT,
    SPLIT,
    layout_text,
    stage_layers,
)
from layout_tuner.search_spaces.layouts.recomputation import (
    ALL_LAYERS,
    MAX_LAYERS_TEXT,
    RECOMPUTE_MODES,
    layers_by_rank,
    read_recompute,
    read_recompute_layers,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import heads_of, width_of_dense_layers
from layout_tuner.search_spaces.spaces.search_space import DERIVABLE, read_auto

AUTO: Final = "auto"
"""The word for a knob that the document leaves to the service."""

MAX_AUTO_COMBINATIONS: Final = 1_000_000
"""Most combinations of a space whose knobs were left out."""

MAX_AUTO_MICRO_BATCH: Final = 32
"""Largest micro-batch that is tried where the document states none."""

LONG_SEQUENCE: Final = 8192
"""Tokens of a sequence from which context parallelism may be the faster choice."""

LEAST_SHARE: Final = 4096
"""Fewest tokens that a context-parallel rank gets, if memory asks for no more ranks."""

MAX_AUTO_EP: Final = 64
"""Largest expert-parallel degree, if memory asks for no more and no domain has more devices."""

MAX_NODES_OF_TP: Final = 4
"""Most nodes that a tensor-parallel group spans in a domain of nodes, or where the document allows
more than one."""

OF_WHOLE_JOB: Final = ("tokens_per_s", "memory_headroom")
"""Objectives that fewer nodes do not serve; the others are per device or cost."""

ONLY_ASKED: Final = ("pipeline_layout", "recompute_layers", "offload", "optimizer_states")
"""Knobs that are at their default where a space leaves them out, and not `auto`."""

_GIVEN_UP: Final = (
    *("pipeline_layout", "recompute_layers", "cp_comm_type", "vpp", "sequence_parallel"),
    *("recompute", "zero_stage", "num_nodes", "micro_batch_size", "cp", "ep", "pp", "tp"),
)
"""Knobs that keep one value where a space would be too large, the first one first."""


@dataclass(frozen=True, kw_only=True)
class DefaultSpace:
    """What the choices of knobs that a document leaves out depend on."""

    model: ModelShape
    cluster: Cluster
    memory_bytes: float
    """Memory of a device that a layout may use."""
    states_nodes: bool
    """Whether the document states the nodes of the cluster. A preset's name does not: presets are
    whole machines."""
    objectives: tuple[Any, ...]
    """The campaign's objectives, as the document states them."""
    largest_allocation: Callable[[str], int | None]
    """The most nodes that a worker on the cluster of a name ever had; None: no worker is known."""

    def filled(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """A space's description with choices for the knobs that are left out, or `auto`.

        Its field `auto` lists the knobs that were chosen here. New ones are left out at their
        default (`Knob.is_new`). A wrong description is returned with its words `auto` left out: the
        reader of spaces says what is wrong with it.

        Raises:
            SpaceInvalidError: the number of nodes is left out and unknown.
        """
        given = read_mapping(described, SpaceInvalidError, "the search space")
        asked = frozenset(name for name, value in given.items() if value == AUTO)
        given = {name: value for name, value in given.items() if value != AUTO}
        batch: Any = given.get("global_batch_size")
        try:
            read_batch = GlobalBatch.read(batch)
            before = read_auto(given.get("auto", ()))
            stated = {
                name: read_choices(KNOBS[name], value)
                for name, value in given.items()
                if name in KNOBS and not (value is None and name in DERIVABLE)
            }
        except SearchSpaceError:
            return given
        choices = _Choices(
            self, stated, read_batch, given.get("allow_tp_across_nodes") is True, asked
        )
        chosen = choices.of_absent_knobs()
        plain = {name: each[0] if len(each) == 1 else list(each) for name, each in chosen.items()}
        plain = {name: value for name, value in plain.items() if not KNOBS[name].is_left_out(value)}
        return {**given, **plain, "auto": [*before, *plain]}


class _Choices:
    """The choices of the absent knobs of one space."""

    def __init__(
        self,
        context: DefaultSpace,
        stated: Mapping[str, tuple[Any, ...]],
        batch: GlobalBatch,
        allow_tp_across_nodes: bool,
        asked: Collection[str] = (),
    ) -> None:
        self._context, self._model, self._cluster = context, context.model, context.cluster
        self._stated, self._batch = stated, batch
        self._tp_leaves_node = allow_tp_across_nodes
        self._asked = asked

    def of_absent_knobs(self) -> dict[str, tuple[Any, ...]]:
        """The choices by knob, of at most `MAX_AUTO_COMBINATIONS` together with the stated ones."""
        derived = set(DERIVABLE) if self._batch.is_fixed else {"dp"}
        absent = [name for name in KNOBS if name not in self._stated and name not in derived]
        chosen = {name: self._of(name) for name in absent}
        for name in _GIVEN_UP:
            lengths = (len(each) for each in {**self._stated, **chosen}.values())
            if math.prod(lengths) <= MAX_AUTO_COMBINATIONS:
                break
            # Of a model with experts, sequence_parallel follows from tp.
            if name in chosen and not (name == "sequence_parallel" and self._model.num_experts):
                chosen[name] = (max(chosen[name]) if name == "num_nodes" else chosen[name][0],)
        return chosen

    def _of(self, knob: str) -> tuple[Any, ...]:
        if knob in self._stated:
            return self._stated[knob]
        # The others have their default: the schedule and the order of ranks that every trainer has,
        # and no tensor columns, since rows and columns of all sizes would be many spaces.
        is_chosen = hasattr(type(self), knob)
        return tuple(getattr(self, knob)) if is_chosen else (KNOBS[knob].default,)

    @cached_property
    def num_nodes(self) -> tuple[int, ...]:
        """The nodes that are stated or known; a half and a quarter where fewer nodes may win."""
        nodes = self._most_nodes()
        if all(objective in OF_WHOLE_JOB for objective in self._context.objectives):
            return (nodes,)
        return tuple(nodes // part for part in (4, 2, 1) if nodes % part == 0)

    def _most_nodes(self) -> int:
        whole = self._cluster.num_nodes
        if self._context.states_nodes or whole == 1:
            return whole
        known = self._context.largest_allocation(self._cluster.name)
        if known is None:
            raise SpaceInvalidError(
                f"it is left out, and nothing says how many of the {whole} nodes of "
                f"{self._cluster.name} the job gets: state num_nodes in the space, such as 16, or "
                f"in the cluster, such as {{preset: {self._cluster.name}, num_nodes: 16}}",
                field="num_nodes",
            )
        return min(known, whole)

    @cached_property
    def _devices(self) -> tuple[int, ...]:
        per_node = self._cluster.devices_per_node
        return tuple(nodes * per_node for nodes in self._of("num_nodes"))

    @cached_property
    def tp(self) -> tuple[int, ...]:
        node, model = self._cluster.devices_per_node, self._model
        near = self._cluster.domain_devices // node
        across = MAX_NODES_OF_TP if self._tp_leaves_node else min(near, MAX_NODES_OF_TP)
        most = node * min(across, max(self._devices) // node)
        widths = (
            width_of_dense_layers(model),
            model.shared_expert_ffn_hidden_size,
            model.vocab_size,
        )
        divided = math.gcd(*heads_of(model).values(), *widths)
        degrees = [
            tp
            for tp in range(1, most + 1)
            if divided % tp == 0 and (node % tp == 0 or tp % node == 0)
        ]
        pp = min(self._stated.get("pp", (1,)))
        return _needed(degrees, lambda tp: self._suffices(tp, pp))

    @cached_property
    def pp(self) -> tuple[int, ...]:
        tp, layers = min(self._stated.get("tp", (1,))), self._model.num_layers
        every = [
            pp for pp in range(1, layers + 1) if any(devices % pp == 0 for devices in self._devices)
        ]
        split = [pp for pp in every if self._split_over(pp)]
        # Few numbers of layers, such as 61, have no even split: their stages are written out.
        says = {"pipeline_layout", "pipeline_split"} & set(self._stated)
        is_written = "pipeline_layout" in self._asked or (max(split) <= 2 < max(every) and not says)
        layouts = (each for each in self._stated.get("pipeline_layout", ()) if each != SPLIT)
        stages, vpps = {len(stage_layers(each)) for each in layouts}, self._stated.get("vpp", (1,))
        split = [pp for pp in every if pp in split or any(pp * vpp in stages for vpp in vpps)]
        degrees = every if is_written else split
        return _needed(degrees, lambda pp: self._suffices(tp, pp))

    @cached_property
    def cp(self) -> tuple[int, ...]:
        """Powers of two: of long sequences, and where one of them does not fit otherwise."""
        length = self._model.seq_length
        degrees = [
            cp
            for cp in (1 << power for power in range(length.bit_length()))
            if (cp == 1 or length % (2 * cp) == 0) and any(n % cp == 0 for n in self._devices)
        ]
        least = next((cp for cp in degrees if self._may_fit(cp=cp)), 1)
        share = LEAST_SHARE if length >= LONG_SEQUENCE else length
        return tuple(cp for cp in degrees if least <= cp <= max(length // share, 2 * least - 1))

    def _may_fit(self, zero_stage: int = 1, **degree: int) -> bool:
        """Whether a sequence fits with the largest other degrees and full recomputation."""
        tp, pp, dp = max(self._of("tp")), max(self._of("pp")), self._devices[-1]
        return self._fits(tp, pp, recompute="full", zero_stage=zero_stage, dp=dp, **degree)

    @cached_property
    def ep(self) -> tuple[int, ...]:
        """Powers of two from the first one with which the experts may fit."""
        zero = max(self._of("zero_stage"))
        least = next((ep for ep in self._expert_degrees if self._may_fit(zero, ep=ep)), 1)
        most = max(MAX_AUTO_EP, self._cluster.domain_devices, least)
        return tuple(ep for ep in self._expert_degrees if least <= ep <= most)

    @cached_property
    def _expert_degrees(self) -> tuple[int, ...]:
        """Powers of two that divide the experts and the devices of some allocation."""
        experts = self._model.num_experts
        powers = (1 << power for power in range(max(experts.bit_length(), 1)))
        return tuple(
            ep for ep in powers if experts % ep == 0 and any(n % ep == 0 for n in self._devices)
        )

    def _most_ep(self, pp: int) -> int:
        """The largest degree over which the ranks of a stage divide, whatever the allocation."""
        usual = [ep for ep in self._expert_degrees if ep <= MAX_AUTO_EP]
        ranks = [devices // pp for devices in self._devices]
        degrees = (ep for ep in self._stated.get("ep", usual) if all(n % ep == 0 for n in ranks))
        return max(degrees, default=1)

    @cached_property
    def cp_comm_type(self) -> tuple[CpCommType, ...]:
        degrees = [cp for cp in self._of("cp") if cp > 1]
        heads = math.gcd(*heads_of(self._model, "full", "window").values())
        exchanges = heads and any(heads % (min(self._of("tp")) * cp) == 0 for cp in degrees)
        return CP_COMM_TYPES[: 3 if exchanges else 2] if degrees else ("all_gather",)

    @cached_property
    def vpp(self) -> tuple[int, ...]:
        splits = [(pp, split) for split in self._of("pipeline_split") for pp in self._of("pp")]
        return tuple(
            vpp
            for vpp in (1, 2, 4)
            if vpp == 1 or any(pp > 1 and self._is_split(split, pp * vpp) for pp, split in splits)
        )

    @cached_property
    def pipeline_split(self) -> tuple[str, ...]:
        """The transformer layers alone, and what else makes a degree legal that they do not."""
        by_layers = [pp for pp in self._of("pp") if self._is_split("layers", pp)]
        others = set(self._of("pp")) - set(by_layers)
        found = (
            split for split in PIPELINE_SPLITS if any(self._is_split(split, pp) for pp in others)
        )
        return (*(["layers"] if by_layers else []), *found) or ("layers",)

    def _split_over(self, pp: int) -> Any:
        """The first split of the space that divides the layers over pp stages; None: none does."""
        splits = self._stated.get("pipeline_split", PIPELINE_SPLITS)
        return next((split for split in splits if self._is_split(split, pp)), None)

    def _is_split(self, split: Any, num_stages: int) -> bool:
        layout = Layout(pp=num_stages, pipeline_split=split)
        return layout.counted_layers(self._model.num_layers) % num_stages == 0

    @cached_property
    def micro_batch_size(self) -> tuple[int, ...]:
        most = min(self._batch.maximum, MAX_AUTO_MICRO_BATCH)
        return tuple(
            size
            for size in range(1, most + 1)
            if _is_round(size) and (not self._batch.is_fixed or self._batch.minimum % size == 0)
        )

    @cached_property
    def num_microbatches(self) -> tuple[int, ...]:
        """Powers of two with which some layout has a batch within the bounds."""
        at_once = [
            devices // math.prod(min(self._of(name)) for name in ("tp", "tp_columns", "cp", "pp"))
            for devices in self._devices
        ]
        least = max(max(at_once), 1) * max(self._of("micro_batch_size"))
        most = self._batch.maximum // min(self._of("micro_batch_size"))
        powers = (1 << power for power in range(most.bit_length()))
        return tuple(each for each in powers if each * least >= self._batch.minimum) or (1,)

    @cached_property
    def zero_stage(self) -> tuple[int, ...]:
        replica = min(self._of("tp")) * min(self._of("pp"))
        return ZERO_STAGES if max(self._devices) > replica else (0,)

    @cached_property
    def recompute(self) -> tuple[str, ...]:
        one = (min(self._stated.get("tp", (1,))), min(self._stated.get("pp", (1,))))
        if self._fits(*one):
            return ("none",)
        if "recompute_layers" not in self._asked:  # as in spaces of releases without the knob
            return RECOMPUTE_MODES
        model = self._model
        has_dense = any(kind.endswith("dense") for kind in model.kind_of_layers)
        others = (*(("mlp",) * has_dense), *(("mla_up_proj",) * (model.kv_lora_rank > 0)))
        # The embedded trainer always recomputes `moe_act`: spaces for it keep the others.
        every = (*others, "moe_act") if model.num_experts else others
        sets = dict.fromkeys(
            read_recompute([*inside, *norms])
            for inside in (every, others)
            for norms in ((), ("layernorm",))
            if inside or norms
        )
        return (*RECOMPUTE_MODES, *sets)

    @cached_property
    def recompute_layers(self) -> tuple[str, ...]:
        """Half of a stage's layers, and numbers by rank, where it is asked.

        By rank they fall as the micro-batches in flight under 1F1B do, to none on the last.
        """
        if "recompute_layers" not in self._asked or self._of("recompute") == ("none",):
            return (ALL_LAYERS,)
        found: dict[str, None] = {ALL_LAYERS: None}
        for pp in self._of("pp"):
            layers = self._model.num_layers // pp
            if layers > 1:
                found[str(layers // 2)] = None
            by_rank = [layers * (pp - 1 - rank) // (pp - 1) for rank in range(pp if pp > 1 else 0)]
            if 0 < len("/".join(map(str, by_rank))) <= MAX_LAYERS_TEXT:
                found[read_recompute_layers(by_rank)] = None
        return tuple(sorted(found, key=lambda text: (text != ALL_LAYERS, layers_by_rank(text))))

    @cached_property
    def pipeline_layout(self) -> tuple[str, ...]:
        """Beside the splits the stages of a pipeline of about equal times.

        Of each pipeline where it is asked, else of those that have no split.
        """
        found = {SPLIT: None}
        pipelines = [(pp, vpp) for pp in self._of("pp") for vpp in self._of("vpp") if pp > 1]
        is_asked = "pipeline_layout" in self._asked
        for pp, vpp in pipelines:
            if not is_asked and (self._split_over(pp) or "pipeline_split" in self._stated):
                continue
            layout = Layout(
                tp=min(self._of("tp")),
                tp_columns=self._least_columns,
                cp=self._least_cp,
                pp=pp,
                vpp=vpp,
                micro_batch_size=min(self._of("micro_batch_size")),
                sequence_parallel=max(self._of("sequence_parallel")),
                precision=self._of("precision")[0],
            )
            stages = balanced_stages(layout, self._model, self._cluster)
            # Irregular stages of many layers may take more characters than a text has.
            if stages and split_of(stages, pp, vpp) is None:
                text = layout_text(stages)
                found |= {text: None} if len(text) <= MAX_TEXT else {}
        return tuple(found)

    @cached_property
    def offload(self) -> tuple[str, ...]:
        """Where it is asked, the optimizer's states, if nothing fits without."""
        fits = self._may_fit(max(self._of("zero_stage")))
        return ("none",) if fits or "offload" not in self._asked else ("none", "optimizer")

    @cached_property
    def sequence_parallel(self) -> tuple[bool, ...]:
        degrees = self._of("tp")
        if self._model.num_experts:  # they need it beside tp
            return tuple(sorted({tp > 1 for tp in degrees}))
        return (False, True) if max(degrees) > 1 else (False,)

    @property
    def precision(self) -> tuple[str, ...]:
        return (self._cluster.default_precision,)

    def _suffices(self, tp: int, pp: int) -> bool:
        """Whether the model fits with these degrees, and the batch divides over the replicas."""
        return self._fits(tp, pp) and all(
            self._may_fill(devices, tp * pp * self._least_cp * self._least_columns)
            for devices in self._devices
        )

    def _may_fill(self, devices: int, replica: int) -> bool:
        """Whether replicas of so many devices may fill the devices, and divide the batch."""
        filling = max(devices // replica, 1)
        on_one_node = self._of("num_nodes") == (1,)
        for dp in self._stated.get("dp", (filling,)):
            # With a stated dp, a job on one node may leave devices idle.
            may_run = dp == filling or (dp < filling and on_one_node)
            if may_run and self._batch_divides(dp * min(self._of("micro_batch_size"))):
                return True
        return False

    def _batch_divides(self, at_once: int) -> bool:
        batch = self._batch
        return batch.minimum % at_once == 0 if batch.is_fixed else at_once <= batch.maximum

    @property
    def _least_cp(self) -> int:
        return int(min(self._stated.get("cp", (1,))))

    @property
    def _least_columns(self) -> int:
        return int(min(self._of("tp_columns")))

    def _fits(
        self, tp: int, pp: int, cp: int | None = None, ep: int | None = None, **others: Any
    ) -> bool:
        """Whether the estimate fits at the smallest micro-batch; `others` are further knobs.

        Without them there is neither ZeRO nor recomputation.
        """
        layout = Layout(
            tp=tp,
            tp_columns=self._least_columns,
            cp=cp or self._least_cp,
            pp=pp,
            ep=ep or self._most_ep(pp),
            pipeline_split=self._split_over(pp) or "layers",
            micro_batch_size=min(self._of("micro_batch_size")),
            num_microbatches=pp,
            sequence_parallel=tp > 1 and self._model.num_experts > 0,
            precision=self._of("precision")[0],
            **others,
        )
        (peak,) = peak_memory_bytes(LayoutColumns.of_each([layout]), self._model)
        return float(peak) <= self._context.memory_bytes


def _needed(degrees: list[int], suffices: Callable[[int], bool]) -> tuple[int, ...]:
    """The degrees up to twice the least one that suffices; 1 alone where 1 does; else all."""
    least = next((degree for degree in degrees if suffices(degree)), None)
    if least is None:
        return tuple(degrees)
    return tuple(degree for degree in degrees if degree <= (1 if least == 1 else 2 * least))


def _is_round(number: int) -> bool:
    """Whether a number is a power of two, or three times one."""
    return any(number == unit << power for unit in (1, 3) for power in range(number.bit_length()))
