"""Sections on how to repeat the campaign, and how to read the figures."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import yaml

from api.report.facts import ReportFacts
from api.report.markup import Markup, note, section, tag
from api.version import version
from results_db.campaigns.imports import IMPORTED
from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.spec.presets.models import MODEL_PRESETS


def reproduction(facts: ReportFacts) -> Markup:
    """Commands, and the campaign's file with presets written out."""
    file = yaml.safe_dump(
        dict(facts.campaign.spec),
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=96,
    )
    return section(
        "How to reproduce it",
        tag("pre", "\n".join(_commands(facts))),
        tag(
            "p",
            "The campaign's file, with presets written out as they were: nothing in it depends on "
            "the version of a preset.",
        ),
        tag("pre", file, class_="file"),
        note(
            "Weights, tokens and the search follow from the seed; the search also from what is measured, "
            "and from the campaigns that it starts from."
        ),
    )


def _commands(facts: ReportFacts) -> Iterator[str]:
    name = shlex.quote(facts.campaign.name)
    yield f"# layout-tuner {version()}"
    if facts.campaign.strategy == IMPORTED:
        yield f"layout-tuner campaign table {name} > {name}.csv   # where this is"
        yield f"layout-tuner campaign import {name}.csv           # where it is to be"
        return
    yield "# the same search again (give it another name where this one is):"
    yield f"layout-tuner campaign submit {name}.yaml"
    if facts.winner is not None:
        yield "# the winner as a training job:"
        yield f"layout-tuner export {name} --format trainer --out job/"
        yield "layout-tuner train --config job/job.json"
        yield from _probe(facts, facts.winner.trial.layout)
    yield "# everything that was measured, as a table:"
    yield f"layout-tuner campaign table {name} > {name}.csv"


def _probe(facts: ReportFacts, layout: Layout) -> Iterator[str]:
    """The command of the winner's probe, if its model is a preset."""
    model = facts.campaign.spec["model"]
    preset = MODEL_PRESETS.get(model["name"])
    if preset is None or preset.to_mapping() != model or layout.num_nodes > 1:
        return
    knobs = []
    for knob in KNOBS.values():
        value = getattr(layout, knob.name)
        if value != knob.default and knob.name != "num_nodes":
            knobs.append(knob.option if knob.is_switch else f"{knob.option} {value}")
    probe = facts.campaign.spec.get("probe", {})
    if probe.get("compile"):
        knobs.append("--compile")
    yield "# the winner's probe by itself, here and now:"
    yield " ".join(["layout-tuner probe --model", shlex.quote(model["name"]), *knobs])


def reading() -> Markup:
    """How to read the figures."""
    sentences = (
        "A layout's figure is at the median step time of all of its runs; the interval holds the true "
        "median with 95 % confidence, from the spread within runs and, where there are repeats, between "
        "them.",
        "Layouts are compared under the same model, global batch and seed; one whose losses are off "
        "those of the others is a failure (diverged), not a result.",
        "A probe that was clearly slower than the best was stopped early; it is ranked by what it "
        "measured and is never the winner.",
        "Ranks that shared devices are never ranked.",
        "Tokens/s grow with the global batch: compare layouts of one batch with each other.",
    )
    return section("How to read it", tag("ul", *(tag("li", sentence) for sentence in sentences)))
