"""The rules of legality: each checks arrays of layouts, and explains one illegal layout.

Nothing is repaired: a layout that breaks a rule is refused with a sentence that names the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, get_args

import numpy as np

from layout_tuner.array_types import Bools
from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layer_kind_rules import LAYER_KIND_RULES, undivided
from layout_tuner.search_spaces.layouts.global_batch import GlobalBatch
from layout_tuner.search_spaces.layouts.layout import (
    KNOBS,
    PIPELINE_SPLITS,
    Layout,
    Precision,
    split_of,
)
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of, codes_of
from layout_tuner.search_spaces.layouts.pipeline_layout import stage_layers
from layout_tuner.search_spaces.memory_levers import LEVER_RULES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import heads_of, width_of_dense_layers
from layout_tuner.search_spaces.rule import Rule, RuleContext, Scope

ALL_SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))

PROBE_SCOPES: Final[frozenset[Scope]] = frozenset({"model", "batch", "trainer"})
"""The rules for a single layout that a user runs by hand: its ranks may outnumber the devices, and
a redundant layout wastes no budget."""

OTHER_TRAINER_SCOPES: Final[frozenset[Scope]] = ALL_SCOPES - {"trainer", "trainer_redundant"}
"""The rules for layouts that another trainer runs."""

PRECISIONS_SUPPORTED: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16")
"""Precisions that the embedded trainer trains in."""


def violations(
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    *,
    global_batch: GlobalBatch | int | None = None,
    allow_tp_across_nodes: bool = False,
    fill_nodes: bool = False,
    scopes: Collection[Scope] = ALL_SCOPES,
) -> list[str]:
    """Why `layout` is illegal: one sentence for each broken rule; empty: it is legal.

    Without a global batch any is legal; with `fill_nodes` a job on one node must use every device,
    too. `PROBE_SCOPES` lets ranks outnumber the devices, `OTHER_TRAINER_SCOPES` checks layouts that
    another trainer runs.
    """
    context = RuleContext(
        model=model,
        cluster=cluster,
        global_batch=GlobalBatch(minimum=global_batch, maximum=global_batch)
        if isinstance(global_batch, int)
        else global_batch,
        allow_tp_across_nodes=allow_tp_across_nodes,
        fill_nodes=fill_nodes,
    )
    columns = LayoutColumns.of(layout)
    return [
        rule.sentence(layout, context)
        for rule in RULES
        if rule.scope in scopes and np.any(rule.illegal(columns, context))
    ]


def _divides(
    name: str, model_field: str, knob: str, said: Callable[[Layout], str] | None = None
) -> Rule:
    """Of a field of the model that a degree must divide; `said` is the degree with its factors."""

    def illegal(c: LayoutColumns, x: RuleContext) -> Bools:
        broken: Bools = getattr(x.model, model_field) % getattr(c, knob) != 0
        return broken

    def sentence(layout: Layout, x: RuleContext) -> str:
        divisor = said(layout) if said else f"{knob}={getattr(layout, knob)}"
        return f"{model_field}={getattr(x.model, model_field)} is not divisible by {divisor}"

    return Rule(name=name, illegal=illegal, sentence=sentence)


def _same_job(name: str, knob: str, axis: str) -> Rule:
    """Of a knob that has a meaning on an axis of several ranks alone."""
    default = KNOBS[knob].default
    return Rule(
        name=name,
        scope="redundant",
        illegal=lambda c, _: (getattr(c, knob) != code_of(knob, default)) & (getattr(c, axis) == 1),
        sentence=lambda layout, _: (
            f"{knob}={word_of(getattr(layout, knob))} with {axis}=1 is the same job as "
            f"{knob}={word_of(default)}"
        ),
    )


def _layers_sentence(layout: Layout, x: RuleContext) -> str:
    stages, layers = layout.pp * layout.vpp, x.model.num_layers
    names = ("embedding", "head")
    ends = [name for name, counts in zip(names, layout.counted_ends, strict=True) if counts]
    total = f"{'+1' * len(ends)}={layers + len(ends)}" if ends else ""
    what = f"{'+'.join(['num_layers', *ends])}={layers}{total}"
    by_split = ((split, replace(layout, pipeline_split=split)) for split in PIPELINE_SPLITS)
    others = [split for split, other in by_split if other.counted_layers(layers) % stages == 0]
    hint = f"; it would be with pipeline_split={' or '.join(others)}" if others else ""
    if stages <= layers:
        hint += f"; {'or ' * bool(others)}state unequal stages as pipeline_layout, if the trainer takes it"
    return f"{what} is not divisible by pp*vpp={layout.pp}*{layout.vpp}={stages}{hint}"


def _is_split(layers: tuple[int, ...]) -> int:
    return split_of(layers, len(layers), 1) is not None


def _tp_leaves_node(c: LayoutColumns, x: RuleContext) -> Bools | np.bool_ | bool:
    if x.allow_tp_across_nodes:
        return False
    # With two or more nodes, a degree that does not divide the node puts some group on two nodes.
    node, domain = x.cluster.devices_per_node, x.cluster.domain_devices
    uneven = (c.num_nodes > 1) & (node % c.tp_ranks != 0)
    fits = (c.tp_ranks % node == 0) & (c.tp_ranks <= domain) if domain > node else False
    broken: Bools = ((c.tp_ranks > node) | uneven) & ~np.asarray(fits)
    return broken


def _tp_leaves_node_sentence(layout: Layout, x: RuleContext) -> str:
    devices, domain, ranks = x.cluster.devices_per_node, x.cluster.domain_devices, _tp_ranks(layout)
    unit = "node"
    if layout.tp_ranks > domain > devices:
        unit, problem = "domain", f"{ranks} is more than the {domain} devices of a domain"
    elif layout.tp_ranks > devices:
        no = "more than" if domain == devices else "no multiple of"
        problem = f"{ranks} is {no} devices_per_node={devices}"
    else:
        problem = f"devices_per_node={devices} is not divisible by {ranks} on num_nodes={layout.num_nodes}"
    return (
        f"{problem}, so that tensor parallelism leaves the {unit} (allow_tp_across_nodes is false)"
    )


def _world_is_wrong(c: LayoutColumns, x: RuleContext) -> Bools:
    devices = c.num_nodes * x.cluster.devices_per_node
    must_fill = (c.num_nodes > 1) | x.fill_nodes
    broken: Bools = (c.num_devices > devices) | (must_fill & (c.num_devices != devices))
    return broken


def _world_sentence(layout: Layout, x: RuleContext) -> str:
    per_node = x.cluster.devices_per_node
    devices = layout.num_nodes * per_node
    degrees = "*".join(map(str, layout.degrees.values()))
    product = f"{'*'.join(layout.degrees)}={degrees}={layout.num_devices}"
    machine = f"num_nodes*devices_per_node={layout.num_nodes}*{per_node}={devices}"
    if layout.num_devices > devices:
        return f"{product} is more than {machine}"
    return f"{product} does not fill {machine}"


def _precision_missing(c: LayoutColumns, x: RuleContext) -> Bools | np.bool_ | bool:
    if not x.cluster.peak_flops_per_s:
        return False
    return np.isin(c.precision, codes_of("precision", x.cluster.peak_flops_per_s), invert=True)


def _batch_is_wrong(c: LayoutColumns, x: RuleContext) -> Bools | np.bool_ | bool:
    if x.global_batch is None:
        return False
    batch = c.global_batch_size
    return (batch < x.global_batch.minimum) | (batch > x.global_batch.maximum)


def _batch_sentence(layout: Layout, x: RuleContext) -> str:
    assert x.global_batch is not None, "the rule holds without a wanted batch"
    low, high = x.global_batch.minimum, x.global_batch.maximum
    once = layout.dp * layout.micro_batch_size
    factors = f"dp*micro_batch_size={layout.dp}*{layout.micro_batch_size}={once}"
    if low == high and low % once:
        return f"global_batch_size={low} is not divisible by {factors}"
    product = (
        f"dp*micro_batch_size*num_microbatches={layout.dp}*{layout.micro_batch_size}"
        f"*{layout.num_microbatches}={layout.global_batch_size}"
    )
    if low == high:
        return f"{product} is not global_batch_size={low}"
    return f"{product} lies outside global_batch_size from {low} to {high}"


def _sequence_sentence(layout: Layout, x: RuleContext) -> str:
    if layout.cp > 1:
        product = 2 * layout.cp * layout.tp
        divisor = f"2*cp*tp=2*{layout.cp}*{layout.tp}={product}"
    else:
        divisor = f"tp={layout.tp}"
    return (
        f"seq_length={x.model.seq_length} is not divisible by {divisor}, which "
        "sequence_parallel needs"
    )


def _exchanges_heads(c: LayoutColumns) -> Bools:
    """Where attention exchanges tokens for heads."""
    exchanges: Bools = (c.cp > 1) & (c.cp_comm_type == code_of("cp_comm_type", "a2a"))
    return exchanges


def _exchanged_heads_sentence(layout: Layout, x: RuleContext) -> str:
    ranks = layout.tp * layout.cp
    return (
        f"{undivided(heads_of(x.model, 'full', 'window'), ranks)} is not divisible by "
        f"tp*cp={layout.tp}*{layout.cp}={ranks}, which cp_comm_type=a2a needs; take all_gather or p2p"
    )


def _query_heads(model: ModelShape) -> dict[str, int]:
    """All heads and groups that tp divides but key and value heads, whose rule has its reason."""
    heads = heads_of(model)
    return {name: size for name, size in heads.items() if not name.endswith("num_kv_heads")}


def _folding_sentence(layout: Layout, _: RuleContext) -> str:
    ranks, parts = layout.tp * layout.dp_cp, layout.etp * layout.ep
    return (
        f"tp*cp*dp={layout.tp}*{layout.cp}*{layout.dp}={ranks} is not divisible by "
        f"etp*ep={layout.etp}*{layout.ep}={parts}: the ranks of a stage divide its experts"
    )


def _experts_are_whole(c: LayoutColumns, x: RuleContext) -> Bools | bool:
    """Where ZeRO shards nothing of experts: there are none, or none twice."""
    is_whole: Bools = c.expert_zero_group_size == 1
    return x.model.num_experts == 0 or is_whole


def _tp_ranks(layout: Layout) -> str:
    """The ranks that hold one copy of a stage's weights, with the factors."""
    if layout.tp_columns == 1:
        return f"tp={layout.tp}"
    return f"tp*tp_columns={layout.tp}*{layout.tp_columns}={layout.tp_ranks}"


def _dp_cp(layout: Layout) -> str:
    """The ranks that sum gradients, with the factors."""
    if layout.cp == 1:
        return f"dp={layout.dp}"
    return f"dp*cp={layout.dp}*{layout.cp}={layout.dp_cp}"


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="heads_over_tp",
        illegal=lambda c, x: math.gcd(*_query_heads(x.model).values()) % c.tp != 0,
        sentence=lambda layout, x: (
            f"{undivided(_query_heads(x.model), layout.tp)} is not divisible by tp={layout.tp}"
        ),
    ),
    Rule(
        name="kv_heads_over_tp",
        # Where tp does not divide the heads, it does not divide the key/value heads either, and the
        # rule above gives the reason.
        illegal=lambda c, x: (
            (math.gcd(*_query_heads(x.model).values()) % c.tp == 0)
            & (math.gcd(*heads_of(x.model).values()) % c.tp != 0)
        ),
        sentence=lambda layout, x: (
            f"{undivided(heads_of(x.model), layout.tp)} is not divisible by tp={layout.tp}, and "
            "key/value heads are not replicated over tensor-parallel ranks"
        ),
    ),
    Rule(
        name="ffn_over_tp",
        illegal=lambda c, x: width_of_dense_layers(x.model) % c.tp != 0,
        sentence=lambda layout, x: (
            f"ffn_hidden_size={x.model.ffn_hidden_size} is not divisible by tp={layout.tp}"
        ),
    ),
    _divides("expert_width_over_etp", "moe_ffn_hidden_size", "etp"),
    _divides("experts_over_ep", "num_experts", "ep"),
    _divides("shared_expert_over_tp", "shared_expert_ffn_hidden_size", "tp"),
    _divides("vocab_over_tp", "vocab_size", "tp_ranks", _tp_ranks),
    _divides("hidden_over_columns", "hidden_size", "tp_columns"),
    Rule(
        name="columns_without_experts",
        illegal=lambda c, x: (c.tp_columns > 1) & ((x.model.num_experts > 0) | (c.ep > 1)),
        sentence=lambda layout, _: (
            f"tp_columns={layout.tp_columns}: tensor columns divide the features of tokens, and "
            "experts get whole tokens; use ep and tp for a model with experts"
        ),
    ),
    Rule(
        name="columns_without_latents",
        illegal=lambda c, x: (c.tp_columns > 1) & (x.model.kv_lora_rank > 0),
        sentence=lambda layout, x: (
            f"tp_columns={layout.tp_columns}: the latents of attention are whole on each rank "
            f"(kv_lora_rank={x.model.kv_lora_rank}); use tp"
        ),
    ),
    Rule(
        name="layers_over_stages",
        illegal=lambda c, x: (
            (c.pipeline_layout == 0)
            & ((x.model.num_layers + sum(c.counted_ends)) % (c.pp * c.vpp) != 0)
        ),
        sentence=_layers_sentence,
    ),
    Rule(
        name="layout_over_stages",
        illegal=lambda c, _: (c.pipeline_layout != 0) & (c.of_stages(len) != c.pp * c.vpp),
        sentence=lambda layout, _: (
            f"pipeline_layout={layout.pipeline_layout} has "
            f"{len(stage_layers(layout.pipeline_layout))} stages, and pp*vpp={layout.pp}*"
            f"{layout.vpp}={layout.pp * layout.vpp}"
        ),
    ),
    Rule(
        name="layout_of_the_layers",
        illegal=lambda c, x: (c.pipeline_layout != 0) & (c.of_stages(sum) != x.model.num_layers),
        sentence=lambda layout, x: (
            f"pipeline_layout={layout.pipeline_layout} has "
            f"{sum(stage_layers(layout.pipeline_layout))} layers t, and num_layers="
            f"{x.model.num_layers}"
        ),
    ),
    Rule(
        name="layout_and_split",
        illegal=lambda c, _: (c.pipeline_layout != 0) & (c.pipeline_split != 0),
        sentence=lambda layout, _: (
            f"pipeline_layout={layout.pipeline_layout} says which layers a stage has; leave out "
            f"pipeline_split={layout.pipeline_split}"
        ),
    ),
    Rule(
        name="interleaving_needs_pipeline",
        illegal=lambda c, _: (c.vpp > 1) & (c.pp == 1),
        sentence=lambda layout, _: f"vpp={layout.vpp} has no pipeline to interleave: pp=1",
    ),
    Rule(
        name="schedule_interleaved",
        illegal=lambda c, _: (c.vpp > 1) & (c.pp > 1) & (c.schedule != 0) & ~c.is_v_shaped,
        sentence=lambda layout, _: (
            f"vpp={layout.vpp} interleaves schedule=1f1b, not schedule={layout.schedule}; take "
            "vpp=1 or schedule=1f1b"
        ),
    ),
    Rule(
        name="v_has_two_chunks",
        illegal=lambda c, _: c.is_v_shaped & (c.pp > 1) & (c.vpp != 2),
        sentence=lambda layout, _: (
            f"schedule={layout.schedule} has two chunks on each rank, in the shape of a V; take vpp=2, "
            f"not vpp={layout.vpp}"
        ),
    ),
    Rule(
        name="interleaved_microbatches",
        illegal=lambda c, _: (c.vpp > 1) & ~c.is_v_shaped & (c.num_microbatches % c.pp != 0),
        sentence=lambda layout, _: (
            f"num_microbatches={layout.num_microbatches} is not divisible by pp={layout.pp}, which "
            f"the interleaved schedule of vpp={layout.vpp} needs"
        ),
    ),
    Rule(
        name="sequence_over_tp",
        # Where 2 cp does not divide the sequence, the rule below gives the reason.
        illegal=lambda c, x: (
            (c.sequence_parallel == 1)
            & (x.model.seq_length % np.where(c.cp > 1, 2 * c.cp * c.tp, c.tp) != 0)
            & ((c.cp == 1) | (x.model.seq_length % (2 * c.cp) == 0))
        ),
        sentence=_sequence_sentence,
    ),
    Rule(
        name="sequence_over_cp",
        illegal=lambda c, x: (c.cp > 1) & (x.model.seq_length % (2 * c.cp) != 0),
        sentence=lambda layout, x: (
            f"seq_length={x.model.seq_length} is not divisible by 2*cp=2*{layout.cp}={2 * layout.cp}: "
            "each context-parallel rank holds two equal chunks of every sequence"
        ),
    ),
    Rule(
        name="heads_over_cp",
        # Where tp does not divide the heads, the rules of tp give the reason.
        illegal=lambda c, x: (
            _exchanges_heads(c)
            & (math.gcd(*heads_of(x.model, "full", "window").values()) % c.tp == 0)
            & (math.gcd(*heads_of(x.model, "full", "window").values()) % (c.tp * c.cp) != 0)
        ),
        sentence=_exchanged_heads_sentence,
    ),
    *LAYER_KIND_RULES,
    Rule(
        name="ep_needs_experts",
        illegal=lambda c, x: (x.model.num_experts == 0) & ((c.ep > 1) | (c.etp > 1)),
        sentence=lambda layout, _: (
            f"ep={layout.ep} and etp={layout.etp} divide experts, and the model has none; leave "
            "them out"
        ),
    ),
    Rule(
        name="ranks_over_experts",
        illegal=lambda c, _: (c.tp * c.dp_cp) % (c.etp * c.ep) != 0,
        sentence=_folding_sentence,
    ),
    Rule(
        name="experts_need_sequence_parallel",
        illegal=lambda c, x: (x.model.num_experts > 0) & (c.tp > 1) & (c.sequence_parallel == 0),
        sentence=lambda layout, _: (
            f"tp={layout.tp} with sequence_parallel=false: all tensor-parallel ranks would send "
            "the same tokens to the experts; a model with experts needs sequence_parallel=true"
        ),
    ),
    _same_job("cp_comm_type_needs_cp", "cp_comm_type", "cp"),
    Rule(
        name="nodes_exist",
        scope="machine",
        illegal=lambda c, x: c.num_nodes > x.cluster.num_nodes,
        sentence=lambda layout, x: (
            f"num_nodes={layout.num_nodes} is more than the {x.cluster.num_nodes} of {x.cluster.name}"
        ),
    ),
    Rule(
        name="tp_within_node",
        scope="machine",
        illegal=_tp_leaves_node,
        sentence=_tp_leaves_node_sentence,
    ),
    Rule(name="world_size", scope="machine", illegal=_world_is_wrong, sentence=_world_sentence),
    Rule(
        name="precision_of_device",
        scope="device",
        illegal=_precision_missing,
        sentence=lambda layout, x: (
            f"precision={layout.precision} is not one that {x.cluster.name} states a peak for "
            f"({', '.join(x.cluster.peak_flops_per_s)})"
        ),
    ),
    Rule(name="global_batch", scope="batch", illegal=_batch_is_wrong, sentence=_batch_sentence),
    Rule(
        name="zero_groups_over_dp",
        illegal=lambda c, _: c.dp_cp % c.zero_replicas != 0,
        sentence=lambda layout, _: (
            f"{_dp_cp(layout)} is not divisible by zero_replicas={layout.zero_replicas}"
        ),
    ),
    Rule(
        name="zero_groups_over_edp",
        # Where it does not divide dp * cp, the rule above gives the reason; where the ranks do not
        # divide the experts, the rule of these does.
        illegal=lambda c, x: (
            (x.model.num_experts > 0)
            & (c.dp_cp % c.zero_replicas == 0)
            & (c.tp * c.dp_cp == c.edp * c.etp * c.ep)
            & (c.edp % c.zero_replicas != 0)
        ),
        sentence=lambda layout, _: (
            f"tp*cp*dp/(etp*ep)={layout.edp} ranks hold the same experts, which is not divisible "
            f"by zero_replicas={layout.zero_replicas}"
        ),
    ),
    Rule(
        name="zero_groups_need_zero",
        illegal=lambda c, _: (c.zero_replicas > 1) & (c.zero_stage == 0),
        sentence=lambda layout, _: (
            f"zero_replicas={layout.zero_replicas} has no sharded optimizer states to copy: "
            "zero_stage=0"
        ),
    ),
    _same_job("split_needs_pipeline", "pipeline_split", "pp"),
    _same_job("schedule_needs_pipeline", "schedule", "pp"),
    Rule(
        name="experts_in_order_of_ranks",
        # Where they do not divide the ranks of a stage, the rule of these gives the reason.
        illegal=lambda c, x: (
            (x.model.num_experts > 0)
            & (c.rank_order != 0)
            & (c.pp > 1)
            & (c.tp * c.dp_cp == c.edp * c.etp * c.ep)
            & (c.edp != c.dp)
        ),
        sentence=lambda layout, _: (
            f"rank_order={layout.rank_order} with pp={layout.pp}: experts need etp*ep="
            f"{layout.etp}*{layout.ep} equal to tp*cp={layout.tp}*{layout.cp}, so that they do not "
            "leave the ranks of a replica; Megatron-LM asserts it too"
        ),
    ),
    Rule(
        name="layout_is_split",
        scope="redundant",
        # A single layout is its split: only a space still has the text.
        illegal=lambda c, _: (c.of_stages(_is_split) != 0) & (c.of_stages(len) == c.pp * c.vpp),
        sentence=lambda layout, _: (
            "the pipeline_layout has the same stages as pipeline_split="
            f"{layout.pipeline_split}; list that instead"
        ),
    ),
    Rule(
        name="rank_order_needs_both",
        scope="redundant",
        illegal=lambda c, _: (c.rank_order != 0) & ((c.pp == 1) | (c.dp == 1)),
        sentence=lambda layout, _: (
            f"rank_order={layout.rank_order} with pp={layout.pp} and dp={layout.dp} is the same job "
            "as rank_order=tp_cp_dp_pp"
        ),
    ),
    Rule(
        name="zero_needs_replicas",
        scope="redundant",
        illegal=lambda c, x: (c.zero_stage > 0) & (c.dp_cp == 1) & _experts_are_whole(c, x),
        sentence=lambda layout, _: (
            f"zero_stage={layout.zero_stage} with dp=1 is the same job as zero_stage=0"
        ),
    ),
    Rule(
        name="zero_needs_groups",
        scope="redundant",
        illegal=lambda c, x: (
            (c.zero_stage > 0)
            & (c.dp_cp > 1)
            & (c.zero_replicas == c.dp_cp)
            & _experts_are_whole(c, x)
        ),
        sentence=lambda layout, _: (
            f"zero_stage={layout.zero_stage} with zero_replicas={layout.zero_replicas} of "
            f"{_dp_cp(layout)} is the same job as zero_stage=0: every rank would hold all optimizer "
            "states"
        ),
    ),
    *LEVER_RULES,
    _same_job("sequence_parallel_needs_tp", "sequence_parallel", "tp"),
    Rule(
        name="trainer_window_over_cp",
        scope="trainer",
        illegal=lambda c, x: (
            (x.model.attention_window is not None) & (c.cp > 1) & ~_exchanges_heads(c)
        ),
        sentence=lambda layout, x: (
            f"cp={layout.cp} with cp_comm_type={layout.cp_comm_type}: the embedded trainer has the "
            f"attention_window={x.model.attention_window} only with cp_comm_type=a2a"
        ),
    ),
    Rule(
        name="trainer_schedule",
        scope="trainer",
        illegal=lambda c, _: c.is_v_shaped,
        sentence=lambda layout, _: (
            f"schedule={layout.schedule} is not supported by the embedded trainer (1f1b, gpipe, "
            "zero_bubble)"
        ),
    ),
    Rule(
        name="trainer_attention",
        scope="trainer",
        illegal=lambda _, x: (
            x.model.attention == "unfused"
            or bool(x.model.attention_dropout or x.model.hidden_dropout)
        ),
        sentence=lambda _, x: (
            f"the model is {x.model.title}, and the embedded trainer has fused attention and no "
            "dropout: leave these fields out, or name another trainer (probe.trainer; for an "
            "estimate --software)"
        ),
    ),
    Rule(
        name="trainer_precision",
        scope="trainer",
        illegal=lambda c, _: np.isin(
            c.precision, codes_of("precision", PRECISIONS_SUPPORTED), invert=True
        ),
        sentence=lambda layout, _: (
            f"precision={layout.precision} is not supported by the embedded trainer "
            f"({', '.join(PRECISIONS_SUPPORTED)})"
        ),
    ),
)
"""All rules, in the order in which reasons are listed."""
