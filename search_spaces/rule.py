"""A rule of legality, and what it is checked with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from layout_tuner.array_types import Bools
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.global_batch import GlobalBatch
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

Scope = Literal["model", "machine", "device", "batch", "redundant", "trainer", "trainer_redundant"]
"""What a rule protects: the arithmetic of the model, the size of the machine, the types of its
device, the batch of the campaign, the budget (redundant: another layout is the same job), the
limits of the embedded trainer, or the budget where it runs the probes (trainer_redundant)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleContext:
    """The model, cluster and settings for which layouts are checked."""

    model: ModelShape
    cluster: Cluster
    global_batch: GlobalBatch | None = None
    """Allowed sequences per step; None: any number."""
    allow_tp_across_nodes: bool = False
    """Whether a tensor-parallel group may span nodes."""
    fill_nodes: bool = False
    """Whether a job on one node must use every device, too (where dp is derived)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One reason why a layout may be illegal."""

    name: str
    """Its name in the counts of excluded layouts."""
    scope: Scope = "model"
    """What the rule protects."""
    illegal: Callable[[LayoutColumns, RuleContext], Bools | np.bool_ | bool] = field(repr=False)
    """Where the rule is broken, for columns that broadcast."""
    sentence: Callable[[Layout, RuleContext], str] = field(repr=False)
    """Why a layout breaks the rule, with the numbers."""
