"""Training runs that have every legal pair of two knobs' values between them.

A run is a line of words: what differs from the first value of each knob in `KNOBS`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.layouts.layout import (
    CP_COMM_TYPES,
    PIPELINE_SPLITS,
    RANK_ORDERS,
    SCHEDULES,
    ZERO_STAGES,
    Layout,
)
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES, PRECISIONS_SUPPORTED, violations
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from tests.workers.trainer.cases import MIXTURES, make_shape
from tests.workers.trainer.tolerances import GLOBAL_BATCH

LAYOUT_FIELDS = {
    **{name: name for name in ("precision", "tp", "cp", "cp_comm_type", "pp", "vpp", "dp")},
    **{name: name for name in ("pipeline_split", "schedule", "rank_order", "recompute")},
    **{name: name for name in ("ep", "etp")},
    "cut": "sequence_parallel",
    "columns": "tp_columns",
    "zero": "zero_stage",
    "replicas": "zero_replicas",
    "mbs": "micro_batch_size",
}
"""The knobs that are fields of a layout; the micro-batches follow from the global batch."""
DEGREES, FLAG = (1, 2, 4), (False, True)
KNOBS: dict[str, Sequence[Any]] = {
    "family": ("gpt", "llama", "moe", "neox", "glm", "mla", "hybrid"),
    "tied": FLAG,
    "balanced": FLAG,
    "kind": ("adamw", "sgd"),
    "clipped": FLAG,
    "precision": PRECISIONS_SUPPORTED,
    "tp": DEGREES,
    "cut": FLAG,
    "columns": DEGREES,
    "cp": DEGREES,
    "cp_comm_type": ("none", *CP_COMM_TYPES),
    "pp": DEGREES,
    "vpp": (1, 2),
    "pipeline_split": PIPELINE_SPLITS,
    "schedule": [each for each in SCHEDULES if each not in V_SLOTS],
    "rank_order": RANK_ORDERS,
    "dp": DEGREES,
    "zero": ZERO_STAGES,
    "replicas": (1, 2),
    "recompute": RECOMPUTE_MODES,
    "ep": DEGREES,
    "etp": (1, 2),
    "mbs": (2, 1, 4),
}
"""What a run may choose. Clipping is below every norm of the gradient; routing is balanced in 16
bits, where rounding could change a router's decision."""

MACHINE = detect_local_cpu()

Values = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def values_of(words: str) -> Values:
    """The value of every knob in the run that these words say."""
    values = {name: choices[0] for name, choices in KNOBS.items()}
    for word in words.split():
        number = re.fullmatch(r"([a-z]+)(\d)", word)
        if word in KNOBS:
            values[word] = True
        elif number and number[1] in KNOBS:
            values[number[1]] = int(number[2])
        else:
            (name,) = (name for name, choices in KNOBS.items() if word in choices)
            values[name] = word
    return values


def words_of(values: Values) -> str:
    """The words that say these values."""

    def word(name: str, value: Any) -> str:
        return name if value is True else value if isinstance(value, str) else f"{name}{value}"

    return " ".join(word(name, values[name]) for name in KNOBS if values[name] != KNOBS[name][0])


def num_ranks(values: Values) -> int:
    return math.prod(values[name] for name in ("tp", "columns", "cp", "pp", "dp"))


def layout_of(values: Values) -> Layout:
    """Raises LayoutInvalidError where there is none."""
    fields = {field: values[name] for name, field in LAYOUT_FIELDS.items()}
    if values["cp_comm_type"] == "none":
        fields["cp_comm_type"] = CP_COMM_TYPES[0]
    microbatches = GLOBAL_BATCH // (values["dp"] * values["mbs"])
    return Layout(**fields, num_microbatches=microbatches)


def shape_of(values: Values) -> ModelShape:
    """A model whose layers the stages divide, and whose heads four ranks do.

    Over cp, windows are for a2a alone (the rule `trainer_window_over_cp`). One with experts and
    windows has a dense layer first.
    """
    family = values["family"]
    ends = {"layers": 0, "embedding_and_head": 2}.get(values["pipeline_split"], 1)
    has_windows = family != "moe" or values["cp"] == 1 or values["cp_comm_type"] == "a2a"
    return make_shape(
        family,
        num_layers=max(4, values["pp"] * values["vpp"]) - ends,
        num_heads=8,
        num_kv_heads=8 if family in ("gpt", "mla") else 4,
        tied_embeddings=values["tied"],
        num_dense_layers=int(family in MIXTURES and family != "hybrid" and has_windows),
        **{} if has_windows else {"attention_window": None, "full_attention_every": None},
    )


def settings_of(values: Values) -> OptimizerSettings:
    clip = 0.5 if values["clipped"] else None
    if values["kind"] == "adamw":
        return OptimizerSettings(clip_grad_norm=clip)
    return OptimizerSettings(kind="sgd", learning_rate=0.1, clip_grad_norm=clip)


def is_legal(values: Values) -> bool:
    """Whether the search space's rules let the trainer run it, and no smaller run is the same."""
    is_mixture = values["family"] in MIXTURES
    if values["balanced"] and not is_mixture:
        return False
    if (values["cp"] > 1) == (values["cp_comm_type"] == "none"):
        return False
    if values["precision"] != "fp32" and is_mixture and not values["balanced"]:
        return False
    try:
        layout = layout_of(values)
    except LayoutInvalidError:
        return False
    scopes = ALL_SCOPES - {"machine"}
    return not violations(layout, shape_of(values), MACHINE, scopes=scopes)


def pairs_of(values: Values) -> set[Pair]:
    return set(itertools.combinations(values.items(), 2))


_STARTS = """,
    moe balanced, pp2, dp2, tp2, tp2 cut, cp2 all_gather, dp4, cp4 all_gather, columns2, dp2 zero1,
    cp2 all_gather zero1, dp4 zero1, pp2 dp2, pp2 dp2 zero1, tp2 pp2, pp4, pp2 cp2 all_gather,
    tp2 dp2, tp2 cut dp2 zero1, tp2 cut pp2, tp2 cp2 all_gather, cp2 all_gather dp2 zero1,
    columns2 dp2, columns2 pp2, columns2 tp2 cut, tp4 cut, columns4, pp2 cp2 p2p,
    moe balanced dp2 ep2, moe balanced dp4 ep2, moe balanced cp2 all_gather, moe balanced pp2,
    moe balanced tp2 cut, moe balanced tp2 cut dp2, moe balanced pp2 dp2, dp4 zero1 pp2,
    dp4 zero1 tp2 cut, dp4 zero1 columns2, moe balanced dp4 ep2 pp2, moe balanced dp4 zero1,
    moe balanced dp4 ep2 zero1, moe balanced dp2 cp2 all_gather"""
STARTS = [values_of(words) for words in _STARTS.split(",")]
"""Runs that a pair of values is tried in, to see whether any run may have it."""


def legal_pairs(known: set[Pair] = frozenset()) -> Iterator[tuple[Pair, Values]]:
    """Every pair that some legal run has, with such a run; those that are `known` are left out.

    Of runs of at most four ranks, or of eight where no value is four: those of twos that ZeRO's
    replicas need.
    """
    for (one, choices), (other, others) in itertools.combinations(KNOBS.items(), 2):
        for value, other_value in itertools.product(choices, others):
            pair = ((one, value), (other, other_value))
            if pair in known:
                continue
            most = 4 if 4 in (value, other_value) else 8
            tried = ({**start, one: value, other: other_value} for start in STARTS)
            few = sorted((each for each in tried if num_ranks(each) <= most), key=num_ranks)
            found = next((each for each in few if is_legal(each)), None)
            if found is not None:
                yield pair, found


RUNS = [
    "moe tied balanced sgd cp2 a2a zero1 full ep2 mbs1",
    "tied sgd clipped tp2 cut pp2 embedding zero_bubble mbs1",
    "llama fp16 cp2 p2p zero3 full mbs4",
    "moe balanced sgd clipped pp2 vpp2 head tp_cp_pp_dp dp2 zero3 mbs1",
    "sgd cp2 p2p pp2 embedding gpipe zero1 selective",
    "moe sgd cp4 p2p zero1 replicas2 etp2 mbs4",
    "moe balanced clipped bf16 tp2 cut full ep2 mbs4",
    "tied sgd clipped pp4 vpp2 embedding_and_head full",
    "moe tied balanced sgd dp4 zero2 replicas2 ep2",
    "sgd columns2 dp2 zero1 full mbs4",
    "moe sgd clipped tp4 cut ep4 mbs1",
    "llama tied fp16 pp2 head zero_bubble tp_cp_pp_dp dp2 zero2 selective mbs1",
    "llama tied sgd clipped columns4 mbs1",
    "moe balanced bf16 cp2 p2p pp2 embedding_and_head gpipe zero3 full etp2 mbs4",
    "moe tied balanced clipped bf16 tp2 cut cp2 p2p zero2 selective ep4 mbs1",
    "sgd cp2 a2a pp2 head zero_bubble zero1 selective",
    "moe tied balanced clipped fp16 cp4 a2a zero2 full ep2 etp2",
    "llama bf16 pp4 head gpipe mbs1",
    "llama tied clipped fp16 columns2 pp2 vpp2 embedding mbs1",
    "tied sgd bf16 cp2 a2a pp2 vpp2 embedding zero2 full mbs4",
    "moe tied balanced sgd clipped fp16 pp2 embedding_and_head gpipe dp2 zero1 selective ep2 mbs4",
    "moe tied balanced sgd cp2 all_gather zero1 full etp2",
    "neox tied sgd tp2 dp2 zero3 full mbs4",
    "glm sgd clipped pp2 head gpipe full mbs4",
    "neox tied sgd clipped fp16 tp4 cut full",
    "glm sgd tp4 cut ep2 etp2 mbs4",
    "mla sgd tp4 cut zero3 ep2",
    "hybrid sgd dp2 etp2",
    "mla cp4 all_gather",
    "hybrid tied balanced sgd clipped bf16 pp2 embedding zero_bubble full mbs1",
    "llama tied sgd bf16 cp2 a2a dp2 zero3 replicas2 selective mbs1",
    "moe clipped dp4 zero1 selective ep4",
    "moe sgd clipped tp2 cut cp2 a2a zero3 ep2 etp2",
    "moe balanced bf16 pp4 embedding zero_bubble full mbs4",
    "moe tied balanced clipped bf16 tp4 cut zero2 full etp2 mbs1",
    "fp16 columns4 full",
    "moe tied sgd clipped cp2 p2p pp2 vpp2 head ep2 mbs4",
    "tied sgd clipped bf16 cp4 all_gather selective mbs1",
    "moe balanced fp16 dp4 full ep4 mbs1",
    "tied bf16 tp2 cut pp2 head gpipe",
    "tied clipped fp16 tp2 cut columns2 selective",
    "llama tied sgd clipped fp16 tp4 selective mbs4",
    "moe tied sgd pp2 head zero_bubble dp2 etp2 mbs1",
    "moe sgd clipped pp2 embedding zero_bubble dp2 zero2 full ep2",
    "llama tied bf16 columns2 cp2 a2a zero3 selective mbs4",
    "moe sgd clipped cp4 a2a zero3 full ep4",
    "llama sgd clipped columns2 pp2 vpp2 embedding_and_head mbs1",
    "fp16 pp4 gpipe selective",
    "moe tied balanced sgd clipped cp2 p2p dp2 zero2 ep4 mbs4",
    "sgd tp4 cut",
    "llama tied bf16 columns4 selective mbs4",
    "cp2 all_gather pp2 vpp2 zero2 mbs4",
    "tied sgd fp16 columns2 pp2 head gpipe full mbs4",
    "moe tied sgd clipped cp2 p2p pp2 embedding_and_head zero_bubble zero2 selective ep2 mbs4",
    "moe tied balanced clipped bf16 tp4 cut zero1 mbs1",
    "moe tied balanced sgd clipped bf16 tp4 cut zero3 ep2 mbs4",
    "llama tied fp16 cp2 a2a pp2 embedding_and_head zero1 selective mbs4",
    "tied sgd clipped bf16 tp2 columns2 selective mbs1",
    "llama tied bf16 cp4 all_gather zero3 selective mbs1",
    "llama tied columns2 cp2 p2p mbs1",
    "moe balanced clipped fp16 cp2 all_gather zero3 full ep2 mbs4",
    "sgd cp2 all_gather dp2 zero2 replicas2 mbs4",
    "llama tied sgd tp2 cut cp2 all_gather zero2 selective",
    "tied sgd clipped cp2 all_gather pp2 head zero_bubble zero1 mbs1",
    "tied sgd clipped fp16 cp2 all_gather pp2 embedding_and_head gpipe zero3",
    "moe tied balanced sgd cp2 all_gather dp2 zero1 ep4",
    "bf16 columns2 cp2 all_gather zero2 full mbs1",
    "clipped bf16 cp2 all_gather pp2 embedding gpipe zero1 selective mbs4",
    "tied sgd clipped pp2 head zero_bubble dp4 zero3 replicas2 full mbs1",
    "glm tied balanced bf16 tp2 cut cp2 a2a zero1 ep2 etp2",
    "neox clipped bf16 cp2 a2a pp2 head zero_bubble zero2 mbs1",
    "neox tied sgd fp16 columns2 pp2 embedding_and_head gpipe selective",
    "glm balanced sgd fp16 cp4 p2p zero2 replicas2 selective ep2 mbs1",
    "neox tied sgd fp16 cp4 p2p zero1 replicas2 mbs1",
    "glm clipped pp2 embedding_and_head zero_bubble tp_cp_pp_dp dp2 zero3 full mbs4",
    "neox tied bf16 cp2 all_gather pp2 vpp2 embedding",
    "glm balanced bf16 cp2 all_gather pp2 vpp2 embedding zero3 selective ep2 mbs4",
    "glm tied balanced sgd clipped fp16 dp4 zero1 full ep4 mbs1",
    "neox clipped columns4",
    "neox tied sgd clipped bf16 pp4 embedding zero_bubble full mbs1",
    "glm tied clipped pp4 vpp2 embedding_and_head selective mbs1",
    "mla tied balanced sgd clipped bf16 pp4 embedding_and_head gpipe full mbs4",
    "mla pp2 vpp2 embedding tp_cp_pp_dp dp2 zero1 selective mbs1",
    "hybrid dp4 zero1 selective ep4",
    "hybrid tp2 cut zero3 mbs4",
    "mla balanced fp16 dp4 zero2 replicas2 etp2",
    "mla tp2 cut",
    "mla cp2 a2a",
    "hybrid pp2 embedding_and_head gpipe tp_cp_pp_dp dp2 zero2 full",
    "hybrid balanced fp16 pp4 vpp2 head",
    "mla dp4 ep4",
    "hybrid cp2 a2a ep2",
    "hybrid dp4 zero1 replicas2",
    "mla cp2 p2p",
    "mla pp2 head zero_bubble",
    "hybrid tp4 cut",
    "llama bf16 tp2 cut pp2 vpp2 embedding_and_head tp_cp_pp_dp dp2 zero1 selective",
    "fp16 pp2 embedding_and_head gpipe tp_cp_pp_dp dp4 zero2 replicas2",
    "llama tied sgd clipped fp16 tp2 cut dp4 zero1 replicas2 mbs1",
    "tied sgd clipped bf16 cp2 a2a pp2 embedding gpipe tp_cp_pp_dp dp2 selective mbs4",
    "llama columns2 pp2 zero_bubble tp_cp_pp_dp dp2 full mbs4",
    "moe balanced bf16 pp2 vpp2 embedding dp4 zero3 replicas2 selective etp2 mbs1",
    "tied sgd columns2 dp4 zero2 replicas2 selective",
    "neox fp16 pp2 embedding_and_head gpipe tp_cp_pp_dp dp4 zero2 replicas2",
]
"""Most new pairs first, and those of eight ranks last; SGD in fp32 has every value early."""
NUM_FAST = 30
"""Runs of the fast suite: nine tenths of the pairs, with SGD in fp32 every value of each knob."""

CHANGES = [(knob, value) for knob, values in KNOBS.items() for value in values]


@st.composite
def random_runs(draw: st.DrawFn) -> Values:
    """A run of the table after as many random changes as leave it legal on at most eight ranks."""
    values = values_of(draw(st.sampled_from(RUNS)))
    for knob, value in draw(st.lists(st.sampled_from(CHANGES), min_size=20, max_size=40)):
        changed = {**values, knob: value}
        if num_ranks(changed) <= 8 and is_legal(changed):
            values = changed
    return values
