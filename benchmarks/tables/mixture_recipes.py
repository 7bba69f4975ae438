"""NVIDIA's published recipes against the estimates and plans: `moe_recipes.csv`.

The table has the layout that won on each machine, by release: 67 rows. The newest release of each
model and machine judges. No constant was fitted to the table, but the errors of the older releases
were seen while the terms were written (docs/explanation/estimates.md, "Which tables chose what").
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_recipes import Recipe
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

RECIPES: Final = "moe_recipes.csv"
SOFTWARE: Final = "Megatron-Bridge"
MOST_PLACE: Final = 0.1
"""Of the recipe among the layouts of its space, as a share of them; the median of all recipes."""
MOST_LOSS: Final = 0.1
"""Predicted loss of the recipe against the plan's first, the median of all recipes."""
_PRESETS: Final = {"GPT OSS 120B": "gpt-oss-120b", "Qwen3_30B_a3B": "qwen3-30b-a3b"}
_PRECISIONS: Final[Mapping[str, Precision]] = {
    "BF16": "bf16",
    **dict.fromkeys(("FP8", "FP8-CS"), "fp8"),
    **dict.fromkeys(("MXFP8", "FP8-MX"), "mxfp8"),
}
_SPACE: Final[Mapping[str, Any]] = {
    "tp": [1, 2, 4, 8],
    "cp": [1, 2, 4],
    "pp": [1, 2, 4, 8, 16],
    "ep": [1, 2, 4, 8, 16, 32, 64],
    "vpp": [1, 2, 4, 8],
    "pipeline_split": ["layers", "embedding_and_head"],
    "micro_batch_size": [1, 2, 4, 8, 16],
    "zero_stage": [0, 1],
    "recompute": ["none", "selective", "full"],
    "sequence_parallel": [False, True],
}


def judge(folder: Path | None) -> tuple[str, bool]:
    """Rows and a table for the results, and whether they are as promised."""
    path = None if folder is None else folder / RECIPES
    if path is None or not path.exists():
        return "", True
    every = read_recipes(path)
    newest = list({(each.model.name, each.cluster.name): each for each in every[::-1]}.values())
    errors = np.array([each.predicted_s / each.step_time_s - 1 for each in newest])
    found = [_in_plan(each) for each in newest]
    places, losses = np.array([place / size for place, size, _ in found]), [f[2] for f in found]
    place, loss = float(np.median(places)), float(np.median(losses))
    rows = [
        (
            f"{each.model.name}, {each.cluster.name}, {each.source}",
            each.layout.precision,
            f"{each.step_time_s:.2f} s",
            f"{each.predicted_s:.2f} s",
            f"{off:+.0%}",
            f"{at:,} of {size:,}",
            f"{lost:.0%}",
        )
        for each, off, (at, size, lost) in zip(newest, errors, found, strict=True)
    ]
    header = (
        "recipe",
        "precision",
        "step: published",
        "predicted",
        "error",
        "place in the plan",
        "loss",
    )
    by_precision = [_of_precision(each, every) for each in dict.fromkeys(_PRECISIONS.values())]
    text = (
        f"| {RECIPES}, newest {len(newest)}: place in a plan of the whole space, median | "
        f"best {MOST_PLACE:.0%} | best {place:.1%} |\n"
        f"| the same: predicted loss against the plan's first, median | {MOST_LOSS:.0%} | "
        f"{loss:.1%} |\n\n{table(header, rows)}\n"
        f"\n{table(('precision, all recipes', 'rows', 'error', 'signed'), by_precision)}\n"
    )
    return text, place <= MOST_PLACE and loss <= MOST_LOSS


def _of_precision(precision: Precision, recipes: Sequence[Recipe]) -> tuple[str, ...]:
    """Rows, mean error and signed mean error of the recipes in one precision."""
    own = [each for each in recipes if each.layout.precision == precision]
    errors = np.array([each.predicted_s / each.step_time_s - 1 for each in own])
    return precision, f"{len(own)}", f"{np.abs(errors).mean():.1%}", f"{errors.mean():+.1%}"


def read_recipes(path: Path) -> list[Recipe]:
    """The recipes of the table, the newest release first."""
    with path.open(newline="") as lines:
        return [_recipe(row) for row in csv.DictReader(lines)]


def _recipe(row: Mapping[str, str]) -> Recipe:
    devices, batch = int(row["num_devices"]), int(row["global_batch_size"])
    model, cluster = _model(row), _cluster(row["hardware"])
    tp, cp, pp, ep, vpp, size = (
        int(row[name]) for name in ("tp", "cp", "pp", "ep", "vpp", "micro_batch_size")
    )
    dp = devices // (tp * cp * pp)
    by_layers = model.num_layers % (pp * vpp) == 0
    layout = Layout(
        num_nodes=-(-devices // cluster.devices_per_node),
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        vpp=vpp,
        pipeline_split="layers" if by_layers else "embedding_and_head",
        micro_batch_size=size,
        num_microbatches=batch // (dp * size),
        zero_stage=1,
        sequence_parallel=tp > 1,
        precision=_PRECISIONS[row["precision"]],
    )
    rate = float(row["tokens_per_s_per_device"]) * devices
    return Recipe(
        source=row["source"],
        model=model,
        cluster=cluster,
        layout=layout,
        step_time_s=batch * model.seq_length / rate,
        software=SOFTWARE,
    )


def _model(row: Mapping[str, str]) -> ModelShape:
    if preset := _PRESETS.get(row["model"]):
        return replace(model_preset(preset), seq_length=int(row["seq_length"]))
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads")
    sizes = {name: int(row[name]) for name in (*names, "seq_length", "vocab_size")}
    return ModelShape.from_mapping({"name": row["model"], "family": "llama", **sizes})


def _cluster(hardware: str) -> Cluster:
    """The preset of a machine."""
    name = hardware.removeprefix("DGX-").lower()
    return CLUSTER_PRESETS["h100-sxm" if name == "h100" else name]


def _in_plan(recipe: Recipe) -> tuple[int, int, float]:
    """The recipe's place in a plan of its whole space, the layouts there, and its loss."""
    layout = recipe.layout
    spec = CampaignSpec.from_mapping(
        {
            "name": "recipe",
            "model": recipe.model.to_mapping(),
            "cluster": recipe.cluster.to_mapping(),
            "budget": {"trials": 1},
            "space": {
                **_SPACE,
                "global_batch_size": layout.global_batch_size,
                "num_nodes": layout.num_nodes,
                "precision": layout.precision,
            },
        }
    )
    legal = spec.legal_set(OTHER_TRAINER_SCOPES)
    ranked = LayoutPredictions(spec=spec, software=SOFTWARE).rank(legal)
    place = int(np.flatnonzero(ranked.order == legal.index_of(layout))[0])
    return place + 1, len(legal), float(1 - ranked.step_time_s[0] / ranked.step_time_s[place])
