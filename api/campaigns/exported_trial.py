"""The files of a training job from a trial of a campaign, with notes on what was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from layout_tuner.api.campaigns.trials import cheap_probes
from layout_tuner.api.errors import ExportUnavailableError
from layout_tuner.api.formatting import gain_sentence, measured_sentence, step_words
from layout_tuner.documents.limits import visible_line
from layout_tuner.errors import LayoutInvalidError
from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
from layout_tuner.protocol.worker_messages import MAX_WORDS
from layout_tuner.results_db.campaigns.imported_tables import IMPORTED
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec, scopes_for
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.node_scaling import scaled
from layout_tuner.terminal.plurals import counted
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import ExportImpossibleError, ExportSource
from layout_tuner.trainers.exports.exported import ExportRead
from layout_tuner.trainers.registry import ADAPTERS, full_name


def export_of(
    store: Store,
    campaign: CampaignRecord,
    format_name: str,
    trial: int | None,
    *,
    nodes: int | None = None,
    without: Collection[str] = (),
) -> ExportRead:
    """The files of a training job for a trial by its number; None: for the best.

    Raises:
        ExportUnavailableError: there is no such trial to export.
        ExportFormatUnknownError: there is no such format.
        ExportImpossibleError: the format cannot express the layout, or it does not scale.
    """
    chosen = _best(store, campaign) if trial is None else _completed(store, campaign, trial)
    spec = campaign.stored.spec
    if campaign.strategy == IMPORTED:
        _refuse_illegal(spec, campaign, chosen, format_name)
    job = spec.job_of(chosen.stands_for)
    said = _comments(store, campaign, chosen, format_name)
    comments = (visible_line(each, MAX_WORDS) for each in said)
    source = ExportSource(
        campaign=campaign.name, trial=chosen.number, job=job, comments=tuple(comments)
    )
    if nodes is not None and nodes != job.layout.num_nodes:
        source = _on_nodes(source, spec, nodes)
    bundle = export(format_name, source, without=without)
    return replace(bundle, notes=[*source.comments, *bundle.notes])


def _comments(
    store: Store, campaign: CampaignRecord, trial: TrialRecord, format_name: str
) -> Iterator[str]:
    """The source of the layout, its gain over the baseline, its measurement, and by whom."""
    if campaign.strategy == IMPORTED:
        source = store.imports.source(campaign.id) or "a table that does not say where"
        yield f"the layout was not measured here: it is imported, from {source}"
        if (model := campaign.stored.spec.model).family == "llama":
            base = model.rotary_base
            yield f"tables do not state the base of the rotary positions: rotary_base={base:g} is assumed"
    if campaign.simulated is not None:
        yield f"the layout and its figures are {campaign.simulated.words}"
    baseline = store.baselines.of_campaigns([campaign]).get(campaign.id)
    gain = store.baselines.gain(campaign, trial.layout_key)
    if baseline is not None and gain is not None:
        yield gain_sentence(gain, baseline, campaign.objective)
    if trial.measurement is not None:
        environment = store.trials.detail(trial.id).environment
        sentence = measured_sentence(trial.measurement, environment)
        probe = cheap_probes(store, [trial]).get(trial.id)
        yield from [sentence] if probe is None else _cheap_comments(probe, sentence)
        if not campaign.is_simulated and campaign.strategy != IMPORTED:
            yield _trainer_comment(trial.measurement.trainer, format_name)


def _trainer_comment(trainer: str, format_name: str) -> str:
    """Which trainer was measured, and whether the file is for another one."""
    target = full_name(format_name)
    words = "the embedded trainer" if trainer == EMBEDDED_TRAINER else f"the trainer {trainer}"
    if trainer == target:
        return f"measured with {words}, which this file is for"
    sure = "" if trainer in ADAPTERS and target != COMMAND.name else " if it is another program"
    return (
        f"measured with {words}; this file is for {target}, whose step and memory may differ{sure}"
    )


def _cheap_comments(probe: CheapProbe, measured: str) -> Iterator[str]:
    """Notes on a layout of which only a part ran: the part, and the extrapolated step."""
    yield f"the layout was not measured in full: a cheap probe ran {probe.runs}"
    yield f"of what ran, {measured}"
    if probe.full_step is not None:
        yield f"extrapolated to the whole layout: a step of {step_words(probe.full_step)}"
    if not probe.measures_memory:
        yield "the memory of the layout was not measured: the probe ran fewer layers"


def _on_nodes(source: ExportSource, spec: CampaignSpec, num_nodes: int) -> ExportSource:
    """The source for more nodes, with the same global batch."""
    layout = source.job.layout
    try:
        larger = scaled(
            layout,
            num_nodes,
            model=spec.model,
            cluster=spec.cluster,
            allow_tp_across_nodes=spec.space.allow_tp_across_nodes,
        )
    except LayoutInvalidError as error:
        raise ExportImpossibleError(str(error)) from error
    change = (
        f"scaled from {counted(layout.num_nodes, 'node')} to {num_nodes}: dp={larger.dp} instead of "
        f"{layout.dp}, num_microbatches={larger.num_microbatches} instead of "
        f"{layout.num_microbatches}, for the same global batch of {layout.global_batch_size}; the "
        "figures of the trial do not hold for this size"
    )
    return source.changed(replace(source.job, layout=larger), change)


def _best(store: Store, campaign: CampaignRecord) -> TrialRecord:
    best = store.leaderboard.winner(campaign.id, campaign.objective)
    if best is not None:
        return best.trial
    raise ExportUnavailableError(
        f"campaign {campaign.name!r} has no ranked trial to export; wait for one, or name a trial"
    )


def _completed(store: Store, campaign: CampaignRecord, number: int) -> TrialRecord:
    trial = store.trials.by_number(campaign.id, number)
    if trial.state == "COMPLETED":
        return trial
    why = f" ({trial.reason})" if trial.reason else ""
    raise ExportUnavailableError(
        f"trial {number} of campaign {campaign.name!r} is {trial.state}{why}; only COMPLETED trials "
        "are exported: name one of the leaderboard"
    )


def _refuse_illegal(
    spec: CampaignSpec, campaign: CampaignRecord, trial: TrialRecord, format_name: str
) -> None:
    """Other trainers run layouts that ours does not: uneven stages, or tp across nodes."""
    sentences = violations(
        trial.layout,
        spec.model,
        spec.cluster,
        allow_tp_across_nodes=spec.space.allow_tp_across_nodes,
        scopes=scopes_for(format_name),
    )
    if sentences:
        raise ExportUnavailableError(
            f"trial {trial.number} of the imported campaign {campaign.name!r} is not legal here: "
            f"{'; '.join(sentences)}; name a trial that is"
        )
