"""Cheap probes among a campaign's trials, and what they say of the layouts that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from results_db.records import TrialRecord
from results_db.store import Store
from search_spaces.belief.cheap_probe_step_time import CheapProbe
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape


def cheap_probes(store: Store, trials: Iterable[TrialRecord]) -> dict[int, CheapProbe]:
    """The cheap probes among trials of any campaigns, by the ids of the trials."""

    @cache
    def spec_of(campaign_id: int) -> Mapping[str, Any]:
        return store.campaigns.get(campaign_id).spec

    found = {}
    for trial in trials:
        layout, num_layers = trial.full_layout, trial.num_layers
        if layout is not None and num_layers is not None:
            found[trial.id] = _probe(spec_of(trial.campaign_id), trial, layout, num_layers)
    return found


def _probe(
    spec: Mapping[str, Any], trial: TrialRecord, layout: Layout, num_layers: int
) -> CheapProbe:
    measured = trial.measurement if trial.state == "COMPLETED" else None
    return CheapProbe.of(
        layout,
        trial.layout,
        num_layers,
        ModelShape.from_mapping(spec["model"]),
        Cluster.from_mapping(spec["cluster"]),
        measured_s=None if measured is None else measured.step_time_s,
    )
