"""Methods about campaigns: the campaigns themselves, their trials, leaderboards and events."""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

import httpx

from layout_tuner.api.schemas.campaigns_and_trials import (
    AnalysisRead,
    CampaignDetail,
    CampaignPage,
    CampaignRead,
    ExportFormatPage,
    ImportRead,
    PlotRead,
    TrialDetailRead,
    TrialPage,
    TrialRead,
    TrialsAdded,
)
from layout_tuner.client.calls import PAGE, Calls, segment
from layout_tuner.client.errors import ServiceError
from layout_tuner.client.notebook import RankedTrials, figure_of, refuse_missing
from layout_tuner.documents.json_values import json_value
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.campaigns.filter import EVERY_CAMPAIGN, CampaignFilter
from layout_tuner.results_db.records import EventRead, Visibility
from layout_tuner.results_db.trials.filter import SINGULAR, ListingSortKey, SortKey, TrialFilter
from layout_tuner.trainers.exports.exported import ExportRead

if TYPE_CHECKING:  # plans import numpy, which other calls do not need
    from plotly.graph_objects import Figure

    from layout_tuner.api.schemas.plans import PlanRead
    from layout_tuner.predictions.belief.plan import Plan

NOTHING: Final[Mapping[str, Any]] = {}

WAIT_POLL_S: Final = 1.0
"""Seconds between two looks at a campaign that is waited for."""

_FIRST_PAGE: Final = {"limit": 20, "offset": 0}


class PlotOptions(TypedDict, total=False):
    """What a plot shows, as on the page Plots; the service chooses what is left out."""

    show: Literal["all"] | None
    """With values that are far out, and older attempts."""
    x: str | None
    """The knobs of the plot of two knobs."""
    y: str | None
    across: str | None
    """The objectives of the front."""
    up: str | None
    knob: str | None
    """The knob of a slice."""


class SharingOptions(TypedDict, total=False):
    """Who sees a campaign; the service chooses what is left out."""

    visibility: Visibility | None
    group: str | None
    priority: int | None


class CampaignCalls(Calls):
    """Campaigns: submit, import, change, read."""

    def create_campaign(
        self,
        document: Mapping[str, Any] | Path | str,
        *,
        if_exists: Literal["refuse", "return"] = "refuse",
        idempotency_key: str | None = None,
        **sharing: Unpack[SharingOptions],
    ) -> CampaignDetail:
        """Submits a campaign.

        It is sent again if no answer comes: by its key the service recognizes the same submission.

        Args:
            document: the description, which may have numpy's numbers and arrays, and ranges; or the
                path of its file (YAML or JSON).
            if_exists: "return": where a campaign of this name and content exists, it is returned.
                One of other content is an error in any case.
            idempotency_key: for sending the same submission again later; None: a new key, and with
                "return" one that follows from the content.
            sharing: who sees it; None: the service's default.

        Raises:
            DocumentMalformedError: the file cannot be read, or JSON has no such value.
        """
        content = json_value(_read(document))
        key = idempotency_key or str(uuid.uuid4())
        if idempotency_key is None and if_exists == "return":
            written = json.dumps([content, sharing] if sharing else content, sort_keys=True)
            key = hashlib.sha256(written.encode()).hexdigest()
        query = {"if_exists": if_exists, **sharing}
        return self._post("/campaigns", CampaignDetail, content, key=key, query=query)

    def wait(self, campaign: str, *, timeout_s: float | None = None) -> CampaignDetail:
        """Waits until a campaign has ended, and returns it.

        The service may be away meanwhile, for at most the `patience_s` of the client.

        Raises TimeoutError if the campaign has not ended after `timeout_s` seconds, also where the
        service is away then; None: no limit.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        read = self.campaign(campaign)
        while read.ended_at is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"campaign {campaign} has not ended in {timeout_s:g} s: it is {read.state} with "
                    f"{read.progress.trials_ended} ended trials, and goes on"
                )
            time.sleep(min(WAIT_POLL_S, left_s))
            try:
                read = self._patiently(lambda: self.campaign(campaign), left_s)
            except ServiceError as error:
                if not error.is_temporary or time.monotonic() < until_s:
                    raise
                not_seen = f"campaign {campaign} was not seen to end in {timeout_s:g} s"
                raise TimeoutError(f"{not_seen}: {error}") from error
        return read

    def plan(
        self,
        document: Mapping[str, Any] | Path | str,
        *,
        top: int | None = None,
        probe_start_s: float | None = None,
        job: TrainingJob | None = None,
        compare: tuple[str, str] | None = None,
    ) -> Plan | PlanRead:
        """Ranks the legal layouts of a campaign by predictions; nothing is submitted.

        With more than 50,000 legal layouts it returns the `PlanRead` of a plan that the driver
        makes, to be read with `planned`.

        Args:
            document: the description of the campaign, or the path of its file.
            top: how many layouts are listed; None: 10.
            probe_start_s: seconds that a probe is taken to last besides its steps; None: 60.
            job: the training job to be predicted with each listed layout.
            compare: two layouts, by rank or key, whose difference is explained.
        """
        from layout_tuner.api.schemas.plans import PlanRead
        from layout_tuner.predictions.belief.plan import Plan

        query = {"top": top, "probe_start_s": probe_start_s, **_job(job)}
        query |= {} if compare is None else {"compare": list(compare)}
        answer = self._send("POST", "/v1/plans", query=query, json=_read(document))
        if answer.status_code == HTTPStatus.ACCEPTED:
            return self._read(answer, PlanRead)
        return self._read(answer, Plan)

    def planned(self, plan_id: int) -> PlanRead:
        """A plan that the driver makes or has made."""
        from layout_tuner.api.schemas.plans import PlanRead

        return self._get(f"/plans/{segment(plan_id)}", PlanRead)

    def import_table(
        self,
        table: bytes,
        *,
        name: str | None = None,
        cells: Sequence[str] = (),
        knobs: Sequence[str] = (),
        declarations: Mapping[str, Any] | None = None,
        **sharing: Unpack[SharingOptions],
    ) -> ImportRead:
        """Imports the cells of a measurement table as campaigns that have ended.

        `knobs` are columns that are job knobs, as `COLUMN` or `COLUMN=KNOB`; `declarations` say by
        the name of a knob what it is.
        """
        query = {"name": name, "cell": list(cells), "knob": list(knobs), **sharing}
        if declarations is not None:
            query["knobs"] = json.dumps(declarations)
        headers = {"Content-Type": "text/csv"}
        answer = self._send(
            "POST", "/v1/campaigns/import", query=query, content=table, headers=headers
        )
        return self._read(answer, ImportRead)

    def campaign_page(
        self,
        *,
        chosen: CampaignFilter = EVERY_CAMPAIGN,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> CampaignPage:
        """A page of the campaigns, the newest first: all, or those that a filter selects."""
        return self._get(
            "/campaigns", CampaignPage, **_campaigns(chosen), limit=limit, cursor=cursor
        )

    def campaigns(self, chosen: CampaignFilter = EVERY_CAMPAIGN) -> Iterator[CampaignRead]:
        """Campaigns, the newest first: all, or those that a filter selects."""
        return self._walk(
            lambda cursor: self.campaign_page(chosen=chosen, limit=PAGE, cursor=cursor),
            lambda page: page.campaigns,
        )

    def campaign(self, campaign: str) -> CampaignDetail:
        """One campaign, by its name or id."""
        return self._get(_path(campaign), CampaignDetail)

    def clone_campaign(
        self,
        campaign: str,
        changes: Mapping[str, Any] = NOTHING,
        *,
        idempotency_key: str | None = None,
        **sharing: Unpack[SharingOptions],
    ) -> CampaignDetail:
        """Submits a campaign like another one. It is sent again as `create_campaign` is.

        `changes` are fields that replace those of the other; without a name the clone is given one.
        Without `sharing` those who see the other see the clone.
        `idempotency_key` is for sending the same clone again later; None: a new key.
        """
        key = idempotency_key or str(uuid.uuid4())
        path, query = _path(campaign, "clone"), dict(sharing)
        return self._post(path, CampaignDetail, dict(changes), key=key, query=query)

    def update_campaign(
        self,
        campaign: str,
        *,
        budget: Mapping[str, Any] | None = None,
        notes: str | None = None,
        **sharing: Unpack[SharingOptions],
    ) -> CampaignDetail:
        """Changes the budget of a campaign that has not ended, its notes and who sees it.

        Bounds of the budget that are missing stay, None removes one; all else that is None stays.
        """
        given: dict[str, Any] = {"budget": budget, "notes": notes, **sharing}
        changes = {name: value for name, value in given.items() if value is not None}
        return self._patch(_path(campaign), CampaignDetail, changes)

    def delete_campaign(self, campaign: str) -> None:
        """Deletes a campaign that has ended, with all of its measurements."""
        self._delete(_path(campaign))

    def report(self, campaign: str, *, job: TrainingJob | None = None) -> str:
        """The campaign as one HTML document without scripts or external resources.

        With a training job it has the job's days with each of the best layouts.
        """
        return self._get_file(_path(campaign, "report"), **_job(job)).text

    def plot(self, campaign: str, name: str, **choices: Unpack[PlotOptions]) -> Figure:
        """A plot of a campaign as a figure of plotly, which the extra `notebook` installs.

        `name` is one of those on the page Plots, such as history, pareto, slice and timeline; an
        unknown one is refused with all names. The sentences of the page's caption are in
        `figure.layout.meta["says"]`; where there is nothing to draw, they are the title.

        Raises PackageMissingError where plotly is not installed.
        """
        refuse_missing("Client.plot", "plotly")
        path = _path(campaign, f"plots/{segment(name)}")
        return figure_of(self._get(path, PlotRead, **choices))

    def pause_campaign(self, campaign: str) -> CampaignDetail:
        """Pauses a campaign: no more of its trials are leased."""
        return self._post(_path(campaign, "pause"), CampaignDetail)

    def resume_campaign(self, campaign: str) -> CampaignDetail:
        """Resumes a paused campaign."""
        return self._post(_path(campaign, "resume"), CampaignDetail)

    def cancel_campaign(self, campaign: str) -> CampaignDetail:
        """Ends a campaign now."""
        return self._post(_path(campaign, "cancel"), CampaignDetail)

    def table(self, campaign: str) -> str:
        """All measurements of a campaign, as a measurement table."""
        return self._get_file(_path(campaign, "table")).text

    def analysis(self, campaign: str) -> AnalysisRead:
        """The importance of the campaign's knobs, and the effect of one step in each."""
        return self._get(_path(campaign, "analysis"), AnalysisRead)

    def export(
        self,
        campaign: str,
        format_name: str,
        *,
        trial: int | None = None,
        nodes: int | None = None,
        without: Sequence[str] = (),
    ) -> ExportRead:
        """The files of a training job.

        Args:
            campaign: its name or id.
            format_name: one of `export_formats`.
            trial: number of the trial; None: the best one.
            nodes: nodes to scale the layout to, with the same global batch; None: as measured.
            without: knobs of the layout that the trainer lacks, and that are dropped.
        """
        query = {"trial": trial, "nodes": nodes, "without": list(without) or None}
        return self._get(_path(campaign, "exports"), ExportRead, format=format_name, **query)

    def export_formats(self) -> ExportFormatPage:
        """The formats of exports, with what each needs to run."""
        return self._get("/exports/formats", ExportFormatPage)


class TrialCalls(Calls):
    """Trials: list by knobs and metrics, read, measure again, cancel."""

    def trial_page(
        self,
        campaign: str,
        *,
        wanted: TrialFilter | None = None,
        sort: SortKey | None = None,
        descending: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
        before: str | None = None,
    ) -> TrialPage:
        """A page of a campaign's trials.

        Args:
            campaign: its name or id.
            wanted: selects trials; None: all.
            sort: the sort key; None: their numbers.
            descending: whether the largest comes first.
            limit: most trials of the page; None: 100.
            cursor: `next_cursor` of the page before; None: the first page.
            before: `previous_cursor` of the page after, instead of `cursor`.
        """
        asked = {"wanted": wanted, "sort": sort, "descending": descending, "limit": limit}
        query = _query({**asked, "cursor": cursor, "before": before})
        return self._get(_path(campaign, "trials"), TrialPage, **query)

    def trials(
        self,
        campaign: str,
        *,
        state: TrialState | None = None,
        wanted: TrialFilter | None = None,
        sort: SortKey | None = None,
        descending: bool = False,
    ) -> Iterator[TrialRead]:
        """A campaign's trials, page after page; each that existed at the first page comes once.

        `state` selects them by state, instead of `wanted`; the others are arguments of
        `trial_page`.
        """
        if state is not None:
            wanted = TrialFilter(states=(state,))
        order: dict[str, Any] = {"wanted": wanted, "sort": sort, "descending": descending}
        return self._walk(
            lambda cursor: self.trial_page(campaign, **order, limit=PAGE, cursor=cursor),
            lambda page: page.trials,
        )

    def trial(self, trial_id: int) -> TrialDetailRead:
        """One trial with all that is stored about it."""
        return self._get(f"/trials/{trial_id}", TrialDetailRead)

    def trial_log(self, trial_id: int) -> str:
        """The last lines that a trial's ranks printed."""
        return self._get_file(f"/trials/{trial_id}/log").text

    def repeat_trial(self, trial_id: int, *, times: int = 1) -> TrialsAdded:
        """Measures the layout of a COMPLETED trial again, this number of times."""
        return self._post(f"/trials/{trial_id}/repeat", TrialsAdded, {"times": times})

    def requeue_trial(self, trial_id: int) -> TrialRead:
        """Tries the layout of a FAILED, INFEASIBLE or CANCELLED trial once more."""
        return self._post(f"/trials/{trial_id}/requeue", TrialRead)

    def cancel_trial(self, trial_id: int) -> TrialRead:
        """Cancels a trial; a running one stays RUNNING until its worker has stopped it."""
        return self._post(f"/trials/{trial_id}/cancel", TrialRead)


class Listing(TypedDict, total=False):
    """Which layouts of a leaderboard are listed, and in which order."""

    objective: str | None
    """What to rank by; None: the campaign's own objective."""
    front: bool
    """Whether to list only the Pareto front over the campaign's objectives."""
    within: float | None
    """Lists only layouts at most this many percent below the best, cheapest first."""
    wanted: TrialFilter | None
    """Selects layouts by knobs, and by their figures at the median step time of their runs."""
    sort: ListingSortKey | None
    """A knob or metric to sort by; None: the rank."""
    descending: bool
    """Whether the largest value of `sort` comes first."""
    limit: int
    """Most layouts of the page; 20 unless it is given."""
    offset: int
    """How many listed layouts come before the page."""


class LeaderboardCalls(Calls):
    """A campaign's leaderboard, as documents or as a table."""

    def leaderboard(self, campaign: str, **listing: Unpack[Listing]) -> RankedTrials:
        """A page of the campaign's leaderboard."""
        path = _path(campaign, "leaderboard")
        return self._get(path, RankedTrials, **_query({**_FIRST_PAGE, **listing}))

    def leaderboard_csv(
        self, campaign: str, *, intervals: bool = True, **listing: Unpack[Listing]
    ) -> str:
        """The same as a measurement table.

        `intervals` adds columns that the format does not define: rank, trial, runs, the interval of
        the step time, ties.
        """
        return self._table(campaign, "csv", intervals, listing).text

    def leaderboard_parquet(
        self, campaign: str, *, intervals: bool = True, **listing: Unpack[Listing]
    ) -> bytes:
        """The table as a Parquet file."""
        return self._table(campaign, "parquet", intervals, listing).content

    def _table(self, campaign: str, form: str, intervals: bool, listing: Listing) -> httpx.Response:
        query = _query({**_FIRST_PAGE, **listing})
        path = _path(campaign, "leaderboard")
        return self._get_file(path, **query, intervals=intervals or None, format=form)


class EventCalls(Calls):
    """Live events; a lost stream is opened again, and continues after the last event.

    The service may be away for the `patience_s` of the client, for example while it is restarted.
    `EventsMissedError` says that events after the given one are no longer stored.
    """

    def events(self, *, after: int | None = None) -> Iterator[EventRead]:
        """Events of all campaigns, without end: from now on, or after the event of this number.

        0 begins with the first event that is stored.
        """
        return self._follow("/events", after, to_end=False)

    def campaign_events(self, campaign: str, *, after: int | None = None) -> Iterator[EventRead]:
        """Events of a campaign and its trials until it has ended; `after` as for `events`.

        The last ones may be of trials that the end of the campaign cancelled.
        """
        return self._follow(_path(campaign, "events"), after, to_end=True)


def _read(document: Mapping[str, Any] | Path | str) -> Any:
    """A document, or that of the file at a path, with the model whose config.json it names."""
    from layout_tuner.documents.json_and_yaml import described  # it imports YAML
    from layout_tuner.search_spaces.models.model_files import with_model

    read = described(document)
    return with_model(read, None if isinstance(document, Mapping) else Path(document).parent)


def _path(campaign: str, part: str | None = None) -> str:
    path = f"/campaigns/{segment(campaign)}"
    return path if part is None else f"{path}/{part}"


def _campaigns(chosen: CampaignFilter) -> dict[str, Any]:
    """The query of a filter of campaigns."""
    query = asdict(chosen)
    query["state"] = list(query.pop("states"))
    for name in ("created_after", "created_before"):
        query[name] = query[name] and query[name].isoformat()
    return query


def filter_query(wanted: TrialFilter) -> Mapping[str, Any]:
    """The query of a filter of trials, which `api.http.query_parameters` reads."""
    return {
        SINGULAR.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in wanted.stated.items()
    }


def _query(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The query of a list: its filter, its order, and what else is asked for."""
    query = dict(asked)
    wanted, descending = query.pop("wanted", None), query.pop("descending", False)
    query |= {"order": "desc" if descending else None, "front": query.get("front") or None}
    return query if wanted is None else {**filter_query(wanted), **query}


def _job(job: TrainingJob | None) -> dict[str, Any]:
    """The query of a training job."""
    if job is None:
        return {}
    return {
        "tokens": str(job.tokens),
        "nodes": job.num_nodes,
        "mtbf_hours": job.mtbf_hours,
        "checkpoint_s": job.checkpoint_s,
        "restart_s": job.restart_s,
    }
