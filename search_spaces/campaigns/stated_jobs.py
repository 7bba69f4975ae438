"""Reads the jobs of a campaign's document: listed layouts, and the settings of the trainer's knobs.

The values of a document that could not be read are still its plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from layout_tuner.documents.dataclass_documents import within
from layout_tuner.documents.reading import Problems, read_mapping, shown
from layout_tuner.errors import CampaignInvalidError, SpaceInvalidError
from layout_tuner.search_spaces.campaigns.campaign_settings import ProbeSettings
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.job_choices import JobChoices, stated_settings
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.registry import adapter_named

MAX_LISTED: Final = 1000
"""Most layouts that a campaign may list."""


def read_parts(values: Mapping[str, Any]) -> tuple[SearchSpace, ModelShape, Cluster] | None:
    """Space, model and cluster of a document; None: one of them could not be read."""
    match [values.get(name) for name in ("space", "model", "cluster")]:
        case [SearchSpace() as space, ModelShape() as model, Cluster() as cluster]:
            return space, model, cluster
    return None


def knobs_of_trainer(values: Mapping[str, Any]) -> tuple[str, dict[str, JobKnob]]:
    """The trainer of the campaign's probes, and the job knobs that it has."""
    probe = values.get("probe")
    trainer = probe.trainer if isinstance(probe, ProbeSettings) else EMBEDDED_TRAINER
    adapter = adapter_named(trainer)
    return trainer, {} if adapter is None else adapter.job_knobs


def read_searched(described: object, values: Mapping[str, Any]) -> JobChoices:
    """The searched job knobs of a document; SpaceInvalidError where its trainer has no such."""
    trainer, catalogue = knobs_of_trainer(values)
    choices = JobChoices.of(described, catalogue, trainer)
    is_compiled = getattr(values.get("probe"), "compile", False)
    given = read_mapping(described, SpaceInvalidError, "the value")
    if is_compiled and "compile" not in given and choices.values("compile"):
        # A condition asks about it.
        return JobChoices.of({**given, "compile": True}, catalogue, trainer)
    return choices


def refuse_unsearched(
    layouts: Sequence[Layout], choices: JobChoices, model: ModelShape, cluster: Cluster
) -> None:
    """Refuses listed jobs whose settings a space does not list (SpaceInvalidError)."""
    problems = Problems(SpaceInvalidError)
    group_of, groups = choices.groups(LayoutColumns.of_each(layouts), model, cluster)
    has = [frozenset(group) for group in groups]
    for place, (each, group) in enumerate(zip(layouts, group_of.tolist(), strict=True)):
        if each.job not in has[group]:
            settings = each.job.words or "the trainer's defaults"
            problem = (
                f"the job of {each.without_job.key} has {settings}, which space.job does not list"
            )
            problems.note(problem, field=f"layouts.{place}.job")
    problems.refuse()


def read_layouts(described: object, values: Mapping[str, Any]) -> tuple[Layout, ...]:
    """The listed layouts, each with all knobs that differ from their defaults.

    Settings of jobs are read as those of a baseline (`with_settings`).
    """
    if not isinstance(described, (list, tuple)):
        raise CampaignInvalidError(f"{shown(described)} is not a list of layouts")
    problems = Problems(CampaignInvalidError)
    layouts = []
    for place, each in enumerate(described[: MAX_LISTED + 1]):
        with problems.collecting(str(place)):
            layout = Layout.from_mapping(each)
            layouts.append(with_settings(layout, layout.job, values) if layout.job else layout)
    problems.refuse()
    return tuple(layouts)


def with_settings(layout: Layout, settings: object, values: Mapping[str, Any]) -> Layout:
    """A layout with the settings of a job as they are stated; defaults are left out.

    A layout of a document whose space, model or cluster cannot be read stays as it is.
    """
    if (parts := read_parts(values)) is None:
        return layout
    space, model, cluster = parts
    trainer, catalogue = knobs_of_trainer(values)
    read = partial(
        stated_settings,
        layout=layout.without_job,
        catalogue=catalogue | space.job.knobs,
        trainer=trainer,
        model=model,
        cluster=cluster,
    )
    return replace(layout, job=within("job", read, settings))
