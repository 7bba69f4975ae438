"""A trainer adapter: what exports to a trainer and probes with it have to know about it.

It is pure: api writes the files of an export from it, and workers start the processes of a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import KNOBS, RANK_ORDERS, Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.log_patterns import NO_PATTERNS, LogPatterns

INITIAL_LOSS_SCALE: Final = 1 << 16
"""At which fp16 starts in the embedded trainer. Megatron's default, 2^32, overflows in the first 16
steps or so, which do not train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerJob:
    """What a trainer is to run: a model in a layout."""

    model: ModelShape
    layout: Layout
    seed: int = 0
    warmup: int = 2
    """Untimed iterations."""
    compile: bool = False
    balanced_routing: bool = False
    """Whether experts get equally many tokens by force, as in a probe."""

    @property
    def ranks_per_node(self) -> int:
        return -(-self.layout.num_devices // self.layout.num_nodes)

    def without(self, knobs: Collection[str]) -> TrainerJob:
        """The job with these knobs of the layout at their defaults."""
        dropped = {knob: KNOBS[knob].default for knob in knobs}
        if "zero_stage" in dropped:
            dropped["zero_replicas"] = KNOBS["zero_replicas"].default
        return replace(self, layout=replace(self.layout, **dropped))


def lacking_knobs(layout: Layout, trainer: str, *knobs: str) -> dict[str, str]:
    """Those of some knobs that the layout sets, with what a trainer without them does."""
    known = {
        "vpp": (
            layout.vpp > 1,
            f"{trainer} has no interleaved schedule; without it the schedule is plain 1F1B instead of "
            f"vpp={layout.vpp}",
        ),
        "pipeline_split": (
            any(layout.counted_ends),
            f"{trainer} has no choice of how stages are cut; without it they have equally many "
            "transformer layers",
        ),
        "zero_replicas": (
            layout.zero_replicas > 1,
            f"{trainer} has no smaller ZeRO groups; without them optimizer states are sharded over "
            f"all of dp={layout.dp}, instead of over {layout.zero_replicas} groups of "
            f"{layout.zero_group_size}",
        ),
    }
    return {knob: known[knob][1] for knob in knobs if known[knob][0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRule:
    """A reason why a trainer cannot have a job that is legal here."""

    name: str
    source: str
    """Where the trainer has the rule: the module, with the class or function."""
    versions: str = ""
    """The versions that have it; empty: the adapter's `target_version` and all others looked at."""
    broken: Callable[[Layout, ModelShape], bool]
    sentence: Callable[[Layout, ModelShape], str]
    """What is wrong, with the numbers, and what to do."""


def kv_heads_rule(trainer: str, source: str) -> TrainerRule:
    """The rule of a trainer that does not copy key and value heads over tp ranks."""
    return TrainerRule(
        name="kv_heads",
        source=source,
        broken=lambda layout, model: model.num_kv_heads % layout.tp != 0,
        sentence=lambda layout, model: (
            f"num_kv_heads={model.num_kv_heads} is not divisible by tp={layout.tp}, which "
            f"{trainer} asks for"
        ),
    )


def shape_rules(trainer: str, source: str) -> tuple[TrainerRule, ...]:
    """The rules of a trainer without experts, and with plain attention."""

    def rule(name: str) -> TrainerRule:
        return TrainerRule(
            name=name,
            source=source,
            broken=lambda _, model: name in model.to_mapping(),
            sentence=lambda _, model: (
                f"{name}={str(model.to_mapping()[name]).lower()} has no counterpart in {trainer}; "
                "use the format megatron-lm, or megatron-bridge"
            ),
        )

    return tuple(map(rule, ("num_experts", "head_dim", "qk_norm", "attention_window")))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerAdapter:
    """A trainer: how it is configured, what it refuses, and how it prints its progress."""

    name: str
    """Its name in campaigns, exports and measurements."""
    target_version: str
    needs: str
    """What a user needs to run an export, as one sentence without a full stop."""
    lacking: Callable[[TrainerJob], Mapping[str, str]] = lambda _job: {}
    """The knobs of the layout that the trainer does not have, by name, each with a sentence on what
    the trainer does without it. Only knobs with another value than the trainer's own behaviour, and
    none that sets the ranks or the batch: those are refusals. A user may accept that they are
    dropped; they then have their defaults in the job, whatever the trainer does."""
    schedules: Collection[str] = ("1f1b",)
    """The pipeline schedules that the trainer has. Others count as lacking."""
    rank_orders: Collection[str] = RANK_ORDERS[:1]
    """The orders of ranks that it has. Others count as lacking."""
    rules: Sequence[TrainerRule] = ()
    """The trainer's own legality, beyond the rules that every exported layout keeps."""
    has_columns: bool = False
    """Whether it divides weights over tensor columns."""
    values: Callable[[TrainerJob], Mapping[str, Any]] = lambda _job: {}
    """The trainer's configuration: plain JSON values under the trainer's own keys."""
    argument_groups: Callable[[TrainerJob], Sequence[Sequence[str]]] = lambda _job: ()
    """Command-line arguments that set the layout, the model and the batch, a line for each group;
    empty for a trainer that is configured by a file."""
    notes: Callable[[TrainerJob], Sequence[str]] = lambda _job: ()
    """What the user must know or add, in one sentence each."""
    log: LogPatterns = NO_PATTERNS
    """How to read what it prints."""

    def arguments(self, job: TrainerJob) -> list[str]:
        """All groups of arguments."""
        return [word for group in self.argument_groups(job) for word in group]

    def refusals(self, job: TrainerJob) -> list[str]:
        """Why the trainer refuses the job, with its numbers; empty if it does not."""
        broken = (rule for rule in self.rules if rule.broken(job.layout, job.model))
        return [rule.sentence(job.layout, job.model) for rule in broken]

    def all_lacking(self, job: TrainerJob) -> Mapping[str, str]:
        """The knobs that the trainer does not have: `lacking`, the schedule, the order of ranks."""
        found = dict(self.lacking(job))
        if job.layout.schedule not in self.schedules:
            found["schedule"] = (
                f"{self.name} has no schedule={job.layout.schedule} with one stage a rank; without "
                "it the schedule is 1F1B"
            )
        if job.layout.rank_order not in self.rank_orders:
            found["rank_order"] = (
                f"{self.name} numbers ranks by tp, cp, dp and pp; without rank_order="
                f"{job.layout.rank_order} the replicas of a stage are neighbours, not its pipeline"
            )
        return found

    def every_refusal(self, job: TrainerJob) -> list[str]:
        """Why the trainer cannot have the job; empty if it can."""
        reasons = self.refusals(job)
        if job.layout.tp_columns > 1 and not self.has_columns:
            reasons.append(
                f"tp_columns={job.layout.tp_columns} has no counterpart in {self.name}; export a "
                "trial with tp_columns=1, or use the format embedded"
            )
        return reasons
