"""The place of published layouts in plans of their whole spaces: DeepSeek-V3 and Nemotron-3 Nano.

Run as `python -m benchmarks.tables.recipes_in_plans DIR`; it writes the section "Recipes of 2026 in
plans" of `benchmarks/RESULTS.md`. A plan has the row's model, machine, devices, batch, precision
and type of the optimizer's states. Its layouts are those that are legal and that are predicted to
fit; the place is by predicted time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.results_file import describe_machine, record, table
from benchmarks.tables.described_rows import even_stages
from benchmarks.tables.judged_tables import LACKS, table_cells
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_shape import ModelShape

RECIPES: Final = "bridge_recipes_2026.csv"
MODELS: Final = ("DeepSeekV3", "Nemotron_3_Nano")
ASKED: Final = 0.1
"""Asked of the median: the share of the layouts that are predicted faster, at most."""
LEAST_FITS: Final = 0.5
"""Predicted probability from which a layout counts as fitting."""
_PIPELINES: Final = tuple((pp, vpp) for pp in (1, 2, 4, 8, 16) for vpp in (1, 2, 4, 8))
_SPACE: Final[dict[str, Any]] = {
    "tp": [1, 2, 4, 8],
    "cp": [1, 2, 4],
    "pp": [1, 2, 4, 8, 16],
    "ep": [1, 2, 4, 8, 16, 32, 64],
    "vpp": [1, 2, 4, 8],
    "micro_batch_size": [1, 2, 4, 8],
    "zero_stage": [1],
    "sequence_parallel": [False, True],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipePlace:
    """A published layout among the layouts of its space."""

    title: str
    layout: Layout
    faster: int
    """Fitting layouts that are predicted faster."""
    fitting: int
    loss: float
    """Share of the predicted throughput of the fastest fitting layout that it loses."""
    fits: float
    """Its predicted probability of fitting."""

    @property
    def share(self) -> float:
        return (self.faster + 1) / self.fitting


def places(path: Path) -> Iterator[RecipePlace]:
    """The places of the distinct layouts of the judged models."""
    known = set()
    for cell, texts in table_cells(path.read_text()):
        for row in cell.rows if cell.model.name in MODELS else ():
            columns = texts[row.number - 1]
            key = cell.model, cell.cluster.name, row.layout
            if columns[LACKS] or row.step_time_s is None or key in known:
                continue
            known.add(key)
            title = f"{cell.model.name}, {row.layout.num_devices} {cell.cluster.name}"
            yield place_of(title, cell.model, cell.cluster, row.layout, cell.key.software)


def place_of(
    title: str, model: ModelShape, cluster: Cluster, layout: Layout, software: str
) -> RecipePlace:
    """The place of one layout in a plan of its space."""
    # A job may take a part of a node, as the table states it.
    cluster = replace(cluster, devices_per_node=layout.num_devices // layout.num_nodes)
    modules = ["mla_up_proj"] if model.kv_lora_rank else []
    modules += ["moe_act", layout.recompute]
    spec = CampaignSpec.from_mapping(
        {
            "name": "recipe",
            "model": model.to_mapping(),
            "cluster": cluster.to_mapping(),
            "budget": {"trials": 1},
            "space": {
                **_SPACE,
                "recompute": list(dict.fromkeys(["none", "selective", "full", *modules])),
                "pipeline_layout": _pipelines(model, layout),
                "global_batch_size": layout.global_batch_size,
                "num_nodes": layout.num_nodes,
                "precision": layout.precision,
                "optimizer_states": layout.optimizer_states,
            },
        }
    )
    legal = spec.legal_set(OTHER_TRAINER_SCOPES)
    predictions = LayoutPredictions(spec=spec, software=software)
    ranked = predictions.rank(legal)
    if (index := legal.index_of(layout)) is None:
        raise ValueError(f"{layout.key} of {model.name} is not legal in its own space")
    at = int(np.flatnonzero(ranked.order == index)[0])
    own_s, fits = ranked.step_time_s[at], ranked.fits >= LEAST_FITS
    fastest_s = float(ranked.step_time_s[fits].min())
    return RecipePlace(
        title=title,
        layout=layout,
        faster=int(np.count_nonzero(ranked.step_time_s[fits] < own_s)),
        fitting=int(np.count_nonzero(fits)),
        loss=1.0 - fastest_s / own_s,
        fits=float(ranked.fits[at]),
    )


def _pipelines(model: ModelShape, layout: Layout) -> list[str]:
    """The pipelines of a space: split by its rule, written with equal stages, and the row's own."""
    stages = {pp * vpp for pp, vpp in _PIPELINES if pp > 1}
    written = [even_stages(model.num_layers, n) for n in sorted(stages) if n <= model.num_layers]
    return list(dict.fromkeys(["split", *filter(None, written), layout.pipeline_layout]))


def main() -> None:
    """Writes the places, and how they compare with what is asked, to the results."""
    found = list(places(Path(sys.argv[1]) / RECIPES))
    rows = [
        (
            each.title,
            each.layout.key,
            f"{each.faster + 1:,} of {each.fitting:,}",
            f"{each.share:.1%}",
            f"{each.loss:.0%}",
            f"{each.fits:.2f}",
        )
        for each in found
    ]
    medians = [
        f"{name or 'all'}: {len(own)} layouts, median {np.median(own):.1%}"
        for name in (*MODELS, "")
        if (own := [each.share for each in found if each.title.startswith(name)])
    ]
    header = ("recipe", "layout", "place", "best", "predicted loss", "probability of fitting")
    outside = [
        f"{each.title}, {each.layout.key}: {each.faster + 1:,} of {each.fitting:,} "
        f"({each.share:.1%}), a predicted loss of {each.loss:.0%}"
        for each in found
        if each.share > ASKED
    ]
    text = (
        f"`python -m benchmarks.tables.recipes_in_plans DIR`; {describe_machine('numpy')}. The place "
        "of a published layout by predicted time among those of its whole space that are legal and "
        f"predicted to fit. Asked of the median: best {ASKED:.0%}. {'; '.join(medians)}. Outside of "
        f"the best {ASKED:.0%}: {'; '.join(outside) or 'none'}. A run prints the place of each."
    )
    print(f"{text}\n\n{table(header, rows)}")
    record("Recipes of 2026 in plans", text)


if __name__ == "__main__":
    main()
