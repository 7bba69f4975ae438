"""How to make it again: the file, the commands, and how the figures are to be read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import yaml

from api.report.facts import ReportFacts
from api.report.markup import Markup, tag
from api.report.tables import note, section
from api.version import version
from results_db.imports import IMPORTED
from search_spaces.layout import Layout
from search_spaces.presets.models import MODEL_PRESETS

_FLAGS = (
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "num_microbatches",
    "zero_stage",
    "zero_replicas",
    "recompute",
    "precision",
)


def reproduction(facts: ReportFacts) -> Markup:
    """Commands and the campaign's file, as it was resolved."""
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
    """The winner's probe by itself, where its model can be named."""
    model = facts.campaign.spec["model"]
    preset = MODEL_PRESETS.get(model["name"])
    if preset is None or preset.to_mapping() != model or layout.num_nodes > 1:
        return
    plain = Layout()
    knobs = [
        f"--{knob.replace('_', '-')} {getattr(layout, knob)}"
        for knob in _FLAGS
        if getattr(layout, knob) != getattr(plain, knob)
    ]
    if layout.sequence_parallel:
        knobs.append("--sequence-parallel")
    probe = facts.campaign.spec.get("probe", {})
    if probe.get("compile"):
        knobs.append("--compile")
    yield "# the winner's probe by itself, here and now:"
    yield " ".join(["layout-tuner probe --model", shlex.quote(model["name"]), *knobs])


def reading() -> Markup:
    """How the figures are to be read."""
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
