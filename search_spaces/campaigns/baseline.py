"""The baseline of a campaign: the layout that its users run today, against which it is compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from layout_tuner.documents.reading import Problems, read_mapping, refuse_all, unknown_names
from layout_tuner.errors import CampaignInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES, violations
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.rule import Scope
from layout_tuner.search_spaces.spaces.search_space import DERIVABLE, SearchSpace


def read_stated_knobs(described: object) -> dict[str, Any]:
    """A baseline's knobs by name; CampaignInvalidError if a knob or value is unknown.

    Its job's settings are below `job`, as they are stated (`stated_settings` reads them).
    """
    stated = read_mapping(described, CampaignInvalidError, "the baseline")
    problems = Problems(CampaignInvalidError)
    known = (*LAYOUT_FIELDS, "job")
    problems.add(*unknown_names(stated, known, CampaignInvalidError, "layout field"))
    for name, value in stated.items():
        if name in KNOBS:
            problems.note(KNOBS[name].problem(value), field=name)
    problems.refuse()
    return stated


def complete_baseline(
    stated: Mapping[str, Any],
    *,
    space: SearchSpace,
    model: ModelShape,
    cluster: Cluster,
    scopes: Collection[Scope] = ALL_SCOPES,
) -> Layout:
    """The baseline with all of its knobs; `scopes` are those of the rules that it obeys.

    A knob that is not stated has the space's value where the space leaves no choice, and otherwise
    its default. `dp` fills the nodes, and `num_microbatches` follows from a fixed global batch. The
    baseline may lie outside of the space.

    Raises:
        CampaignInvalidError: the layout is illegal, with the sentence of each rule that it breaks;
            or the number of micro-batches is missing, and follows from nothing.
    """
    knobs = {name: knob.default for name, knob in KNOBS.items() if name not in DERIVABLE}
    knobs["precision"] = cluster.default_precision
    for name in space.knobs:
        if len(choices := space.values(name)) == 1:
            knobs[name] = choices[0]
    if "num_nodes" in space.auto:
        knobs["num_nodes"] = max(space.values("num_nodes"))
    knobs |= stated
    if "num_microbatches" not in knobs and not space.global_batch.is_fixed:
        raise CampaignInvalidError(
            "it is missing, and the space has several values and no fixed global_batch_size that it "
            "would follow from: state it",
            field="num_microbatches",
        )
    layout = space.layout_of(knobs, cluster.devices_per_node)
    sentences = violations(
        layout,
        model,
        cluster,
        global_batch=space.global_batch,
        allow_tp_across_nodes=space.allow_tp_across_nodes,
        fill_nodes="dp" not in knobs,
        scopes=scopes,
    )
    refuse_all(CampaignInvalidError(sentence) for sentence in sentences)
    return layout
