"""The estimates alone where it counts: near the top of a cell, and on published recipes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_cells import GROUPS, HALVES
from benchmarks.search.search_record import Part, Promise
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Knowledge, knowledge_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.tuner.replay.judged_estimates import EstimatedCell, estimate_cell

Tables = Mapping[str, MeasurementTable]

NEAR: Final = 0.2
"""Layouts that lose at most this share of the cell's best throughput are near the top."""
RECIPES: Final = "published_recipes.csv"
CLUSTERS: Final = {"a100-80gb": "a100-sxm", "mi250x-gcd": "frontier"}
"""Cluster presets by the device of a published row."""
MEGATRON: Final = "Megatron-LM"
"""What ran the recipes, or what it is built on."""
_LAYOUT: Final = ("tp", "pp", "dp", "vpp", "micro_batch_size", "num_microbatches", "zero_stage")


def near_top(tables: Tables) -> Part:
    """Median |log(predicted / measured)| near the top, cold, and calibrated on the other half."""
    rows = [_near_row(f"{group.title}, cold", group.of(tables), ()) for group in GROUPS]
    for estimated, known in (HALVES, HALVES[::-1]):
        rows.append(
            _near_row(
                f"{estimated.title}, from {known.title}", estimated.of(tables), known.of(tables)
            )
        )
    text = table(("cells", "layouts near the top", "median error", "all that ran"), rows)
    return Part(title="near-top", text=f"Near: within {NEAR:.0%} of the cell's best.\n\n{text}")


def _near_row(
    title: str, cells: tuple[TableCell, ...], known: tuple[TableCell, ...]
) -> tuple[str, ...]:
    knowledge = knowledge_of(known) if known else Knowledge()
    times = TimeCalibration.fit(knowledge)
    estimated = [estimate_cell(cell, times, knowledge) for cell in cells]
    if not estimated:
        return title, "-", "-", "-"
    near = np.concatenate([_log_errors(one, NEAR) for one in estimated])
    every = np.concatenate([_log_errors(one, 1.0) for one in estimated])
    return title, f"{near.size}", f"{np.median(near):.1%}", f"{np.median(every):.1%}"


def _log_errors(estimated: EstimatedCell, share: float) -> np.ndarray:
    """|log(predicted / measured)| of the layouts within a share of the cell's best."""
    best = np.nanmax(estimated.tokens_per_s)
    near = estimated.completed & (estimated.tokens_per_s >= (1 - share) * best)
    off = np.log(estimated.expected_step_time_s[near] / estimated.step_time_s[near])
    return np.asarray(np.abs(off))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One published layout, and what it reached."""

    source: str
    model: ModelShape
    cluster: Cluster
    layout: Layout
    step_time_s: float
    """As published, or from the published TFLOP/s."""
    software: str = MEGATRON
    """What ran it."""

    @property
    def predicted_s(self) -> float:
        """The estimate of the step by the priors alone."""
        log_s, _ = TimeCalibration().predict(
            self.layout, self.model, self.cluster, software=self.software
        )
        return float(np.exp(log_s[0]))

    def tflops(self, step_s: float) -> float:
        """Model TFLOP/s of a device."""
        tokens = self.layout.global_batch_size * self.model.seq_length
        per_device = tokens / step_s / self.layout.num_devices
        return per_device * self.model.model_flops_per_token / 1e12


def read_recipes(path: Path) -> list[Recipe]:
    """The rows of a table of recipes that state a whole layout."""
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if all(row[name] for name in _LAYOUT)]
    return [_recipe(row) for row in rows]


def _recipe(row: Mapping[str, str]) -> Recipe:
    cluster = CLUSTER_PRESETS[CLUSTERS[row["device"]]]
    # Megatron-LM did not fuse attention yet; the runs on Frontier had FlashAttention.
    is_fused = cluster.name == "frontier"
    attention = {} if is_fused else {"attention": "unfused"}
    model = ModelShape.from_mapping(
        {"family": "gpt", "name": row["model"], **attention}
        | {
            name: int(row[name])
            for name in (
                "num_layers",
                "hidden_size",
                "ffn_hidden_size",
                "num_heads",
                "seq_length",
                "vocab_size",
            )
        }
    )
    devices = int(row["num_devices"])
    layout = Layout(
        **{name: int(row[name]) for name in _LAYOUT},
        num_nodes=-(-devices // cluster.devices_per_node),
        sequence_parallel=row["sequence_parallel"] == "1",
        recompute=row["recompute"],
        precision=row["precision"],
    )
    if row["step_time_s"]:
        step_s = float(row["step_time_s"])
    else:
        is_model = row["tflops_kind"] == "model"
        flops = model.hardware_flops_per_token("none" if is_model else layout.recompute)
        tokens = layout.global_batch_size * model.seq_length
        step_s = tokens * flops / (float(row["tflops_per_device"]) * 1e12 * devices)
    return Recipe(
        source=row["source"],
        model=model,
        cluster=cluster,
        layout=layout,
        step_time_s=step_s,
        software="Megatron-DeepSpeed" if is_fused else MEGATRON,
    )


def recipes(folder: Path | None) -> Part:
    """Predicted against published step times of whole recipes, by the priors alone."""
    path = None if folder is None else folder / RECIPES
    read = read_recipes(path) if path is not None and path.exists() else []
    errors = [recipe.predicted_s / recipe.step_time_s - 1 for recipe in read]
    promises = [
        Promise(
            what=f"recipes, cold: {name} error of the step time",
            asked=f"{most:.0%}",
            measured=float(figure(np.abs(errors))) if errors else None,
            most=most,
            shown="{:.1%}",
        )
        for name, figure, most in (("mean", np.mean, 0.12), ("worst", np.max, 0.20))
    ]
    if not errors:
        return Part(
            title="recipes", text=f"The tables have no {RECIPES}.", promises=tuple(promises)
        )
    text = table(
        (
            "source",
            "model",
            "devices",
            "layout",
            "step: published",
            "predicted",
            "TFLOP/s",
            "error",
        ),
        [_recipe_row(recipe, error) for recipe, error in zip(read, errors, strict=True)],
    )
    about = (
        "TFLOP/s are a device's by model FLOPs, published and predicted; where a source gives hardware "
        "FLOPs (with recomputation), the step time follows from those."
    )
    return Part(
        title="recipes",
        text=f"By the priors alone.\n\n{_by_device(read, errors)}",
        details=f"{about}\n\n{text}",
        promises=tuple(promises),
    )


def _recipe_row(recipe: Recipe, error: float) -> tuple[str, ...]:
    at, predicted_s = recipe.layout, recipe.predicted_s
    virtual = f" vpp{at.vpp}" if at.vpp > 1 else ""
    parallel = " sp" if at.sequence_parallel else ""
    return (
        recipe.source,
        recipe.model.name,
        f"{at.num_devices}",
        f"tp{at.tp} pp{at.pp} dp{at.dp}{virtual}{parallel} mbs{at.micro_batch_size}, {at.recompute}",
        f"{recipe.step_time_s:.2f} s",
        f"{predicted_s:.2f} s",
        f"{recipe.tflops(recipe.step_time_s):.0f} / {recipe.tflops(predicted_s):.0f}",
        f"{error:+.1%}",
    )


def _by_device(read: list[Recipe], errors: list[float]) -> str:
    """Errors by machine and recomputation: the signs say what is wrong."""
    groups: dict[tuple[str, str], list[float]] = {}
    for recipe, error in zip(read, errors, strict=True):
        groups.setdefault((recipe.cluster.name, recipe.layout.recompute), []).append(error)
    rows = [
        (f"{name}, {mode}", f"{len(own)}", f"{np.mean(own):+.1%}", f"{np.mean(np.abs(own)):.1%}")
        for (name, mode), own in groups.items()
    ]
    return table(("machine and recomputation", "recipes", "mean error, signed", "mean error"), rows)
