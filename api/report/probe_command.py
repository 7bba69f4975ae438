"""The commands that measure a trial's layout again by itself, and that repeat a campaign."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from layout_tuner.results_db.campaigns.imported_tables import IMPORTED
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.campaign_settings import ProbeSettings
from layout_tuner.search_spaces.campaigns.fidelity import cheap_iterations, with_layers
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged
from layout_tuner.search_spaces.clusters.cluster_presets import LOCAL_CPU
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.parameters import ParameterValue
from layout_tuner.units import GIB
from layout_tuner.version import version

MODEL_FILE: Final = "model.yaml"

TRAINERS_FILE: Final = "trainers.yaml"
"""Stands for the file of the worker that ran it."""

_ALWAYS_WRITTEN: Final = ("num_microbatches", "precision")
"""Knobs whose default depends on the machine or on other options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCommand:
    """A command line of `layout-tuner probe`."""

    line: str
    model: Mapping[str, Any] | None
    """The content of `MODEL_FILE`, which the line names; None: the model is a preset."""


def probe_command(
    spec: CampaignSpec,
    layout: Layout,
    *,
    num_layers: int | None = None,
    is_limited: bool = False,
) -> ProbeCommand | None:
    """The command for a layout of a campaign; None: `layout-tuner probe` has none for it.

    That is so of several nodes, and of job knobs without an option.

    A cheap probe has `num_layers` of the model; a limited one states the memory limit.
    """
    if layout.num_nodes > 1 or layout.job.keys() - {"compile"}:
        return None
    model, cluster, probe, default = spec.model, spec.cluster, spec.probe, ProbeSettings()
    iterations = probe.iterations
    if num_layers is not None:
        model, iterations = with_layers(model, num_layers), cheap_iterations(iterations)
    is_preset = MODEL_PRESETS.get(model.name) == model
    words = ["layout-tuner", "probe", "--model", model.name if is_preset else MODEL_FILE]
    if cluster.name != LOCAL_CPU:
        words += ["--cluster", cluster.name]
    for knob in KNOBS.values():
        value = getattr(layout, knob.name)
        if knob.name != "num_nodes" and (value != knob.default or knob.name in _ALWAYS_WRITTEN):
            words += [knob.option] if knob.is_switch else [knob.option, str(value)]
    for option, given, usual in (
        ("--steps", iterations, default.iterations),
        ("--warmup", probe.warmup, default.warmup),
        ("--deadline", probe.deadline_s, default.deadline_s),
        ("--seed", spec.seed, 0),
    ):
        if given != usual:
            words += [option, str(given)]
    if is_limited:
        words += ["--memory-limit-gb", str(cluster.device_memory_bytes / GIB)]
    compiles = bool(layout.job.get("compile", probe.compile))
    switches = {"--compile": compiles, "--no-balanced-routing": not probe.balanced_routing}
    words += [option for option, is_set in switches.items() if is_set]
    if probe.trainer != default.trainer:
        words += ["--trainers", TRAINERS_FILE, "--trainer", probe.trainer]
        for name, value in probe.parameters.items():
            words += ["--parameter", f"{name}={_parameter(value)}"]
    return ProbeCommand(line=shlex.join(words), model=None if is_preset else model.to_mapping())


def _parameter(value: ParameterValue) -> str:
    """A value as `parameters_of` reads it back: a text that is JSON too, such as 5, is quoted."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, ensure_ascii=False)


def commands(campaign: CampaignRecord, winner: Layout | None) -> Iterator[str]:
    """Lines for a shell: the search again, the winner as a job, its probe, the table."""
    name = shlex.quote(campaign.name)
    yield f"# layout-tuner {version()}"
    if campaign.strategy == IMPORTED:
        yield f"layout-tuner campaign table {name} > {name}.csv   # where this is"
        yield f"layout-tuner campaign import {name}.csv           # where it is to be"
        return
    yield "# the same search again (give it another name where this one is):"
    yield f"layout-tuner campaign submit {name}.yaml"
    spec = campaign.stored.read
    if winner is not None:
        yield "# the winner as a training job:"
        if campaign.trainer == EMBEDDED_TRAINER:
            yield f"layout-tuner export {name} --format embedded --out job/"
            yield "layout-tuner train --config job/job.json"
        else:
            yield f"layout-tuner export {name} --format command --out job/"
        probe = None if isinstance(spec, Damaged) else probe_command(spec, winner)
        if probe is not None and probe.model is None:
            yield "# the winner's probe by itself, here and now:"
            yield probe.line
    yield "# everything that was measured, as a table:"
    yield f"layout-tuner campaign table {name} > {name}.csv"
