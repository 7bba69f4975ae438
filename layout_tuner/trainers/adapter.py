"""A trainer adapter: what exports to a trainer and probes with it have to know about it.

It is pure: api writes the files of an export from it, and workers start the processes of a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import KNOBS, RANK_ORDERS, Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.layouts.recomputation import ALL_LAYERS, RECOMPUTE_MODES
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.untrained_models import UNTRAINED
from layout_tuner.trainers.log_patterns import NO_PATTERNS, LogPatterns
from layout_tuner.trainers.trainer_knob import (
    RanCheck,
    TrainerKnob,
    Writing,
    with_arguments,
    with_keys,
)

INITIAL_LOSS_SCALE: Final = 1 << 16
"""The first loss scale of fp16 in the embedded trainer. With Megatron's default, 2^32, about the
first 16 steps overflow and do not train."""


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
        """The job with these knobs, of the layout or of the job, at their defaults."""
        settings = {name: each for name, each in self.layout.job.items() if name not in knobs}
        dropped = {knob: KNOBS[knob].default for knob in knobs if knob in KNOBS}
        if "zero_stage" in dropped:
            dropped["zero_replicas"] = KNOBS["zero_replicas"].default
        return replace(self, layout=replace(self.layout, **dropped, job=JobSettings(settings)))


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


_LEVERS: Final[Mapping[str, tuple[str, Callable[[Layout], bool], str]]] = {
    "stages": (
        "pipeline_layout",
        lambda layout: layout.is_written_out,
        "no setting for the layers of each stage; without it the stages are the trainer's own",
    ),
    "modules": (
        "recompute",
        lambda layout: layout.recompute not in RECOMPUTE_MODES,
        "no recomputation of single modules; without it no activations are recomputed",
    ),
    "layers": (
        "recompute_layers",
        lambda layout: layout.recompute_layers != ALL_LAYERS,
        "no number of layers that recompute; without it all of them do",
    ),
    "layers_by_rank": (
        "recompute_layers",
        lambda layout: "/" in layout.recompute_layers,
        "no number of layers for each pipeline rank; without them all layers recompute",
    ),
    "activations": (
        "offload",
        lambda layout: layout.offload == "activations",
        "no offloading of activations alone; without it they stay on the device",
    ),
    "optimizer": (
        "offload",
        lambda layout: layout.offload == "optimizer",
        "no offloading of the optimizer alone; without it its states stay on the device",
    ),
    "bf16_states": (
        "optimizer_states",
        lambda layout: layout.optimizer_states == "bf16",
        "no setting for moments of 16 bits beside masters in fp32; without it they are fp32",
    ),
}
"""Stages and levers of memory: the layout's knob, where a layout has it, what a trainer lacks."""


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


SHAPE_FIELDS: Final = (
    *("num_experts", "head_dim", "qk_norm", "attention_window", "layer_kinds", "kv_lora_rank"),
    *("attention_output_gate", "attention_sinks", "activation", "norm", "biases", "parallel_block"),
    *("rotary_fraction", "num_mtp_layers", "mean_document_length"),
)
"""Fields of a model that some trainers do not have; others need one of these."""


def narrow_rule(
    source: str, why: str, has: Collection[str] = (), *, versions: str = ""
) -> TrainerRule:
    """The rule of a trainer that has no precisions of 8 bits and fewer, or some (`has`) alone."""
    return TrainerRule(
        name="narrow_precision",
        source=source,
        versions=versions,
        broken=lambda layout, _: layout.precision in NARROW and layout.precision not in has,
        sentence=lambda layout, _: f"precision={layout.precision} {why}",
    )


def shape_rules(
    trainer: str, source: str, names: Sequence[str] = (*SHAPE_FIELDS, *ATTENTION_FIELDS)
) -> tuple[TrainerRule, ...]:
    """The rules of a trainer that has no counterpart of some fields of a model.

    A model leaves out fields at their defaults. Such a trainer has fused attention and no dropout.
    """

    def rule(name: str) -> TrainerRule:
        zero = () if name == "rotary_fraction" else (0,)
        usual = (None, "fused", "swiglu", "rms", "none", *zero)
        return TrainerRule(
            name=name,
            source=source,
            broken=lambda _, model: model.to_mapping().get(name) not in usual,
            sentence=lambda _, model: (
                f"{name}={'[...]' if name == 'layer_kinds' else word_of(model.to_mapping()[name])} "
                f"has no counterpart in {trainer}; "
                f"use the format megatron-lm{'' if name == 'attention' else ', or megatron-bridge'}"
            ),
        )

    return tuple(map(rule, names))


def or_embedded(model: ModelShape) -> str:
    """The advice to take the embedded trainer; empty where it does not train the model."""
    stated = model.to_mapping()
    has_other = any(stated.get(name) not in (None, "fused", 0) for name in ATTENTION_FIELDS)
    is_untrained = has_other or any(words(model) for words in UNTRAINED.values())
    return "" if is_untrained else ", or use the format embedded"


_PLAIN: Final = Layout(precision="bf16")
"""A layout that breaks no rule about layouts."""


def _no_groups(_job: TrainerJob) -> Sequence[Sequence[str]]:
    return ()


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the values of another one in its place, section by section."""
    found = dict(values)
    for name, value in over.items():
        own = found.get(name)
        is_section = isinstance(value, Mapping) and isinstance(own, Mapping)
        found[name] = merged(cast("Mapping[str, Any]", own), value) if is_section else value
    return found


def _part(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The part of a configuration at a path; empty: it has none."""
    first, *rest = path
    if first not in values:
        return {}
    if not rest:
        return {first: values[first]}
    inner = values[first]
    part = _part(inner, rest) if isinstance(inner, Mapping) else {}
    return {first: part} if part else {}


def overrides(values: Mapping[str, Any], form: Callable[[str, Any], list[str]]) -> list[list[str]]:
    """Values as words of the command line, as `form` writes a dotted path and its value."""
    return [form(path, value) for path, value in _flat(values)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    levers: Callable[[Layout], Collection[str]] = lambda _layout: ()
    """Which of `_LEVERS` it has for a layout. Others count as lacking."""
    has_columns: bool = False
    """Whether it divides weights over tensor columns."""
    layout_values: Callable[[TrainerJob], Mapping[str, Any]] = lambda _job: {}
    """The trainer's configuration, without the settings of the job: plain JSON values under the
    trainer's own keys."""
    layout_arguments: Callable[[TrainerJob], Sequence[Sequence[str]]] = _no_groups
    """Command-line arguments that set the layout, the model and the batch, a line for each group;
    empty for a trainer that is configured by a file."""
    placement_groups: Callable[[TrainerJob], Sequence[Sequence[str]]] = _no_groups
    """Those of `layout_arguments` that set layout, batch and precision, for a script of the user's
    that states the model and the data by itself; empty: the trainer has none."""
    values_are_arguments: bool = False
    """Whether its arguments state the values of `layout_values`, as overrides of them."""
    notes: Callable[[TrainerJob], Sequence[str]] = lambda _job: ()
    """What the user must know or add, in one sentence each."""
    log: LogPatterns = NO_PATTERNS
    """How to read what it prints."""
    knobs: Sequence[TrainerKnob] = ()
    """Its catalogue of job knobs."""
    placement_paths: Sequence[str] = ()
    """Dotted paths in `layout_values`, of values or whole sections, that set layout, batch and
    precision; empty: the trainer has no configuration of its own."""
    any_settings: bool = False
    """Whether it takes every setting, as a program does that reads them in its environment."""
    version: str = ""
    """The version that is run, where a knob is written otherwise in some; empty: the target's."""

    @property
    def has_placement(self) -> bool:
        """Whether it has `placement_arguments`; a trainer that is configured by a file has none."""
        return self.placement_groups is not _no_groups

    def placement_values(self, job: TrainerJob) -> dict[str, Any]:
        """The values of layout, batch, precision and job knobs, without model, seed and data."""
        keys = {path for each in self._writings(job) for path, _ in dict(each.keys).items()}
        placed: dict[str, Any] = {}
        values = self.values(job)
        for path in (*self.placement_paths, *sorted(keys)):
            placed = merged(placed, _part(values, path.split(".")))
        return placed

    @property
    def job_knobs(self) -> dict[str, JobKnob]:
        """The job knobs that campaigns may search, by name."""
        return {each.knob.name: each.knob for each in self.knobs}

    def _writing(self, name: str, value: JobValue) -> Writing | None:
        """How a setting is written; None: the trainer has no such knob or value."""
        found = (each for each in self.knobs if each.knob.name == name)
        unknown = Writing() if self.any_settings else None
        return unknown if (knob := next(found, None)) is None else knob.writing(value, self.version)

    def _writings(self, job: TrainerJob) -> list[Writing]:
        """How the settings of a job are written; `all_lacking` names those that are not."""
        found = (self._writing(name, value) for name, value in job.layout.job.items())
        return [each for each in found if each is not None]

    def values(self, job: TrainerJob) -> Mapping[str, Any]:
        """The trainer's configuration, as plain JSON values."""
        return with_keys(self.layout_values(job), self._writings(job))

    def argument_groups(self, job: TrainerJob) -> Sequence[Sequence[str]]:
        """All command-line arguments, a line for each group."""
        return with_arguments(self.layout_arguments(job), self._writings(job))

    def placement_arguments(self, job: TrainerJob) -> list[str]:
        """The arguments of layout, batch, precision and job knobs, without model, seed and data."""
        groups = with_arguments(self.placement_groups(job), self._writings(job))
        return [word for group in groups for word in group]

    def environment(self, job: TrainerJob) -> dict[str, str]:
        """Variables that set the job's knobs."""
        found: dict[str, str] = {}
        for writing in self._writings(job):
            found |= dict(writing.environment)
        return found

    def ran_checks(self, job: TrainerJob) -> list[RanCheck]:
        """The lines of the log that say whether the settings of a job were dropped."""
        settings = job.layout.job
        return [
            RanCheck(name=each.knob.name, asked=settings[each.knob.name], pattern=pattern, ran=ran)
            for each in self.knobs
            if each.knob.name in settings
            for pattern, ran in each.ran
        ]

    def arguments(self, job: TrainerJob) -> list[str]:
        """All groups of arguments."""
        return [word for group in self.argument_groups(job) for word in group]

    def refusals(self, job: TrainerJob, *, of_model: bool = False) -> list[str]:
        """Why the trainer cannot have the job, with its numbers; empty if it can.

        What a plain layout breaks too comes first, or alone with `of_model`.
        """
        broken = [rule for rule in self.rules if rule.broken(job.layout, job.model)]
        first = [rule for rule in broken if rule.broken(_PLAIN, job.model)]
        others = [rule for rule in broken if rule not in first and not of_model]
        reasons = [rule.sentence(job.layout, job.model) for rule in (*first, *others)]
        if job.layout.tp_columns > 1 and not (self.has_columns or of_model):
            reasons.append(
                f"tp_columns={job.layout.tp_columns} has no counterpart in {self.name}; export a "
                f"trial with tp_columns=1{or_embedded(job.model)}"
            )
        return reasons

    def all_lacking(self, job: TrainerJob) -> Mapping[str, str]:
        """What the trainer does not have: `lacking`, schedule, order of ranks, settings."""
        found = dict(self.lacking(job))
        if job.layout.schedule not in self.schedules:
            is_v = job.layout.is_v_shaped
            found["schedule"] = (
                f"{self.name} has no schedule={job.layout.schedule}"
                f"{'' if is_v else ' with one stage a rank'}; without it the schedule is "
                f"{'interleaved ' if is_v else ''}1F1B"
            )
        if job.layout.rank_order not in self.rank_orders:
            found["rank_order"] = (
                f"{self.name} numbers ranks by tp, cp, dp and pp; without rank_order="
                f"{job.layout.rank_order} the replicas of a stage are neighbours, not its pipeline"
            )
        levers = _LEVERS if self.any_settings else self.levers(job.layout)
        for lever, (knob, is_set, lacks) in _LEVERS.items():
            if lever not in levers and is_set(job.layout) and knob not in found:
                found[knob] = f"{self.name} has {lacks}"
        for name, value in job.layout.job.items():
            if self._writing(name, value) is None:
                known = self.job_knobs.get(name)
                what, default = f"knob {name}", "default"
                if known is not None and known.default is not None:
                    what, default = (
                        f"{name}={word_of(value)}",
                        f"default of {word_of(known.default)}",
                    )
                found[name] = (
                    f"{' '.join(filter(None, (self.name, self.version)))} has no {what}; without it "
                    f"the trainer does as by its {default}"
                )
        return found
