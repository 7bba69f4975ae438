"""Plans and estimates without a service: `layout_tuner.plan`, `layout_tuner.estimate`, commands.

Campaigns, models and clusters are names of presets, mappings of fields, or files in JSON or YAML.
Clusters have the constants that `layout-tuner calibrate` measured on a cluster of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layout_tuner.documents.json_and_yaml import described, read_file
from layout_tuner.documents.reading import read_mapping, refuse_all, shown
from layout_tuner.errors import CampaignInvalidError, LayoutInvalidError
from layout_tuner.predictions.belief.known_measurements import (
    Knowledge,
    Sample,
    knowledge_of,
    read_calibrating_cells,
)
from layout_tuner.predictions.estimates.trainer_storage import storage_hypotheses
from layout_tuner.predictions.estimator import Calibration, Estimator, LayoutEstimate
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.protocol.connection.data_home import default_data_dir
from layout_tuner.search_spaces.clusters.calibration_file import with_measured_constants
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import LOCAL_CPU, resolve_cluster
from layout_tuner.search_spaces.clusters.site import cluster_part
from layout_tuner.search_spaces.layouts.layout import DEGREES, Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.layouts.stated_layout import stated_layout
from layout_tuner.search_spaces.legality_rules import PROBE_SCOPES, violations
from layout_tuner.search_spaces.models.model_files import described_model, with_model
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.trainers.embedded import software_named
from layout_tuner.trainers.registry import ADAPTERS, adapter_named

if TYPE_CHECKING:  # an estimate takes half as long without what plans need
    from layout_tuner.predictions.belief.plan import Plan
    from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec

Described = str | Path | Mapping[str, Any]
"""A preset's name, a file in JSON or YAML, or fields."""

Tables = str | Path | Iterable[str | Path]
"""Measurement tables, or some of their cells as `TABLE:KEY=VALUE,...`."""


def plan(
    campaign: Described,
    *,
    cluster: Described | None = None,
    software: str = "",
    calibrate_from: Tables = (),
    data_dir: Path | None = None,
    top: int | None = None,
    probe_start_s: float | None = None,
    job: TrainingJob | None = None,
    compare: tuple[str, str] | None = None,
    measured: Iterable[Sample] = (),
) -> Plan:
    """Ranks the legal layouts of a campaign by predictions, without running any.

    Args:
        campaign: a file, or its fields.
        cluster: takes the place of the campaign's; None: that of the campaign.
        software: what would run the layouts, such as megatron-lm, or layout-tuner for this
            project's trainer; empty: the trainer of the campaign's probes.
        calibrate_from: measurements that calibrate the estimates.
        data_dir: where `layout-tuner calibrate` keeps constants; None: the environment's.
        top: most layouts to list; None: ten.
        probe_start_s: seconds that a probe is taken to last besides its steps; None: a minute.
        job: a training job, to be predicted with each listed layout.
        compare: two layouts, by rank or key, whose difference is explained.
        measured: further measurements that calibrate them.

    Raises:
        SearchSpaceError: a file, a name or a field is wrong, or no layout is legal.
    """
    from layout_tuner.predictions.belief.plan import make_plan

    spec = read_campaign(campaign, cluster=cluster, data_dir=data_dir)
    known = Knowledge(samples=(*read_knowledge(calibrate_from), *measured))
    stated: dict[str, Any] = {"top": top, "probe_start_s": probe_start_s}
    ran_by = software_named(software) if software else None
    found = make_plan(
        spec,
        knowledge=known,
        software=ran_by,
        job=job,
        compare=compare,
        **{name: value for name, value in stated.items() if value is not None},
    )
    unknown = _unknown_software(ran_by or "", spec.cluster, known)
    return replace(found, warnings=(*found.warnings, unknown)) if unknown else found


def read_campaign(
    campaign: Described, *, cluster: Described | None = None, data_dir: Path | None = None
) -> CampaignSpec:
    """The campaign of a file or of fields, with the constants that were measured on its cluster."""
    from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec

    file = None if isinstance(campaign, Mapping) else Path(campaign)
    document = campaign if file is None else read_file(file)
    document = with_model(document, None if file is None else file.parent)
    fields = read_mapping(document, CampaignInvalidError, "the campaign")
    if cluster is not None:
        fields["cluster"] = cluster
    if "cluster" in fields:
        fields["cluster"] = _measured(fields["cluster"], data_dir)
    return CampaignSpec.from_document(fields)


def estimate(
    model: Described,
    layout: Layout | Mapping[str, Any],
    *,
    seq_length: int | None = None,
    cluster: Described = LOCAL_CPU,
    software: str = "",
    calibrate_from: Tables = (),
    data_dir: Path | None = None,
    job: TrainingJob | None = None,
) -> LayoutEstimate:
    """Predicts throughput, step time and memory of one layout, without running it.

    Args:
        model: the shape of the model; a file may be its config.json of Hugging Face.
        layout: a layout, or knobs of it, as `{"tp": 8, "global_batch_size": 64}`: knobs that are
            left out have their defaults, and as many nodes are taken as its ranks fill.
        seq_length: tokens per sequence, which a config.json does not say; None: the model's own.
        cluster: what it would run on.
        software: what would run it; empty: this project's trainer.
        calibrate_from: measurements that calibrate the estimates.
        data_dir: where `layout-tuner calibrate` keeps constants; None: the environment's.
        job: a training job, to be predicted with the layout.

    Raises:
        SearchSpaceError: a file, a name or a knob is wrong, or the layout is illegal.
    """
    known = read_knowledge(calibrate_from)
    machine, guessed = resolve_cluster(_measured(cluster, data_dir))
    shape = resolve_model(described_model(model, seq_length=seq_length))
    if not isinstance(layout, Layout):
        knobs = read_mapping(layout, LayoutInvalidError, "the layout")
        degrees = [each for name in DEGREES if isinstance(each := knobs.get(name), int)]
        nodes = max(-(-prod(degrees) // machine.devices_per_node), 1)
        layout = stated_layout(knobs, precision=machine.default_precision, num_nodes=nodes)
    software = software_named(software)
    # Other trainers have other rules.
    scopes = PROBE_SCOPES - {"trainer", "model"} if software else PROBE_SCOPES
    if software and layout.precision in NARROW:
        scopes |= {"device"}
    broken = violations(layout, shape, machine, scopes=scopes)
    refuse_all(LayoutInvalidError(rule) for rule in broken)
    calibration = Calibration(known.on(machine))
    estimator = Estimator(model=shape, cluster=machine, software=software, calibration=calibration)
    unknown = _unknown_software(software, machine, known)
    return estimator.estimate(layout, job, warnings=filter(None, (guessed, unknown)))


def _unknown_software(software: str, cluster: Cluster, known: Knowledge) -> str | None:
    """A warning about software that is no known trainer, and that no measurement is of."""
    is_known = adapter_named(software) or len(storage_hypotheses(software, cluster)) == 1
    if is_known or any(each.software == software for each in known):
        return None
    return (
        f"{shown(software)} is no known trainer, and no given measurement is of it: its memory is a "
        f"guess; known are {', '.join(ADAPTERS)}"
    )


def read_knowledge(calibrate_from: Tables) -> Knowledge:
    """What the cells of some tables measured; TableInvalidError if one cannot be used."""
    tables = [calibrate_from] if isinstance(calibrate_from, str | Path) else calibrate_from
    return knowledge_of(cell for table in tables for cell in read_calibrating_cells(str(table)))


def _measured(cluster: Described, data_dir: Path | None) -> Any:
    """The description of a cluster, with the constants that were measured on it, where any were."""
    return with_measured_constants(cluster_part(described(cluster)), data_dir or default_data_dir())
