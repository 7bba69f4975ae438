"""Methods about campaigns: the campaigns themselves, their trials, leaderboards and events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import httpx

from api.client.call import (
    PAGE,
    Call,
    PagedCall,
    Stream,
    delete,
    get,
    get_bytes,
    get_text,
    patch,
    post,
    post_once,
    reader_of,
    segment,
)
from api.client.methods import follow, route, walk
from api.http.filter_encoding import filter_query
from api.schemas.campaigns_and_trials import (
    AnalysisRead,
    CampaignDetail,
    CampaignPage,
    CampaignRead,
    ExportFormatPage,
    ExportRead,
    ImportRead,
    LeaderboardPage,
    TrialDetailRead,
    TrialPage,
    TrialRead,
    TrialsAdded,
)
from api.schemas.plans import PlanRead
from results_db.campaigns.filter import EVERY_CAMPAIGN, CampaignFilter
from results_db.leaderboard.leaderboard_query import ListingSortKey
from results_db.trials.filter import TrialFilter
from results_db.trials.sort_order import SortKey
from search_spaces.belief.plan import Plan
from search_spaces.protocol.worker_messages import TrialState
from search_spaces.statistics.job_duration import TrainingJob

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class CampaignCalls:
    """Campaigns: submit, import, change, read."""

    @route
    def create_campaign(
        self, document: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[CampaignDetail]:
        """Submits a campaign.

        It is sent again if no answer comes: by its key the service recognizes the same submission.

        Args:
            document: its description.
            idempotency_key: for sending the same submission again later; None: a new key.
        """
        key = idempotency_key or str(uuid.uuid4())
        return post_once("/campaigns", CampaignDetail, document, key)

    @route
    def plan(
        self,
        document: Mapping[str, Any],
        *,
        top: int | None = None,
        probe_start_s: float | None = None,
        job: TrainingJob | None = None,
    ) -> Call[Plan | PlanRead]:
        """Ranks the legal layouts of a campaign by predictions; nothing is submitted.

        With more than 50,000 legal layouts it returns the `PlanRead` of a plan that the driver
        makes, to be read with `planned`.

        Args:
            document: the description of the campaign.
            top: how many layouts are listed; None: 10.
            probe_start_s: seconds that a probe is taken to last besides its steps; None: 60.
            job: the training job to be predicted with each listed layout.
        """
        return Call(
            method="POST",
            path="/v1/plans",
            read=_read_plan,
            query={"top": top, "probe_start_s": probe_start_s, **_job(job)},
            json=document,
        )

    @route
    def planned(self, plan_id: int) -> Call[PlanRead]:
        """A plan that the driver makes or has made."""
        return get(f"/plans/{segment(plan_id)}", PlanRead)

    @route
    def import_table(
        self, table: bytes, *, name: str | None = None, cells: Sequence[str] = ()
    ) -> Call[ImportRead]:
        """Imports the cells of a measurement table as campaigns that have ended."""
        return Call(
            method="POST",
            path="/v1/campaigns/import",
            read=reader_of(ImportRead),
            content=table,
            query={"name": name, "cell": list(cells)},
            headers={"Content-Type": "text/csv"},
        )

    @route
    def campaign_page(
        self,
        *,
        chosen: CampaignFilter = EVERY_CAMPAIGN,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[CampaignPage]:
        """A page of the campaigns, the newest first: all, or those that a filter selects."""
        return get("/campaigns", CampaignPage, **_campaigns(chosen), limit=limit, cursor=cursor)

    @walk
    def campaigns(
        self, chosen: CampaignFilter = EVERY_CAMPAIGN
    ) -> PagedCall[CampaignPage, CampaignRead]:
        """Campaigns, the newest first: all, or those that a filter selects."""
        query = {**_campaigns(chosen), "limit": PAGE}
        return PagedCall(
            page=lambda cursor: get("/campaigns", CampaignPage, cursor=cursor, **query),
            items=lambda page: page.campaigns,
        )

    @route
    def campaign(self, campaign: str) -> Call[CampaignDetail]:
        """One campaign, by its name or id."""
        return get(_path(campaign), CampaignDetail)

    @route
    def clone_campaign(
        self,
        campaign: str,
        changes: Mapping[str, Any] = NOTHING,
        *,
        idempotency_key: str | None = None,
    ) -> Call[CampaignDetail]:
        """Submits a campaign like another one. It is sent again as `create_campaign` is.

        Args:
            campaign: the other one.
            changes: fields that replace those of the other; without a name the clone is given one.
            idempotency_key: for sending the same clone again later; None: a new key.
        """
        key = idempotency_key or str(uuid.uuid4())
        return post_once(_path(campaign, "clone"), CampaignDetail, dict(changes), key)

    @route
    def update_campaign(
        self, campaign: str, *, budget: Mapping[str, Any] | None = None, notes: str | None = None
    ) -> Call[CampaignDetail]:
        """Changes the budget of a campaign that has not ended, and its notes.

        Args:
            campaign: its name or id.
            budget: bounds by name: one that is missing stays, None removes one.
            notes: the new notes; None: the old ones stay.
        """
        given = {"budget": budget, "notes": notes}
        changes = {name: value for name, value in given.items() if value is not None}
        return patch(_path(campaign), CampaignDetail, changes)

    @route
    def delete_campaign(self, campaign: str) -> Call[None]:
        """Deletes a campaign that has ended, with all of its measurements."""
        return delete(_path(campaign))

    @route
    def report(self, campaign: str, *, job: TrainingJob | None = None) -> Call[str]:
        """The campaign as one HTML document without scripts or external resources.

        Args:
            campaign: its name or id.
            job: a training job, whose days with each of the best layouts are in the report.
        """
        return get_text(_path(campaign, "report"), **_job(job))

    @route
    def pause_campaign(self, campaign: str) -> Call[CampaignDetail]:
        """Pauses a campaign: no more of its trials are leased."""
        return post(_path(campaign, "pause"), CampaignDetail)

    @route
    def resume_campaign(self, campaign: str) -> Call[CampaignDetail]:
        """Resumes a paused campaign."""
        return post(_path(campaign, "resume"), CampaignDetail)

    @route
    def cancel_campaign(self, campaign: str) -> Call[CampaignDetail]:
        """Ends a campaign now."""
        return post(_path(campaign, "cancel"), CampaignDetail)

    @route
    def table(self, campaign: str) -> Call[str]:
        """All measurements of a campaign, as a measurement table."""
        return get_text(_path(campaign, "table"))

    @route
    def analysis(self, campaign: str) -> Call[AnalysisRead]:
        """The importance of the campaign's knobs, and the effect of one step in each."""
        return get(_path(campaign, "analysis"), AnalysisRead)

    @route
    def export(
        self,
        campaign: str,
        format_name: str,
        *,
        trial: int | None = None,
        nodes: int | None = None,
        without: Sequence[str] = (),
    ) -> Call[ExportRead]:
        """The files of a training job.

        Args:
            campaign: its name or id.
            format_name: one of `export_formats`.
            trial: number of the trial; None: the best one.
            nodes: nodes to scale the layout to, with the same global batch; None: as measured.
            without: knobs of the layout that the trainer lacks, and that are dropped.
        """
        query = {"trial": trial, "nodes": nodes, "without": list(without) or None}
        return get(_path(campaign, "exports"), ExportRead, format=format_name, **query)

    @route
    def export_formats(self) -> Call[ExportFormatPage]:
        """The formats of exports, with what each needs to run."""
        return get("/exports/formats", ExportFormatPage)


class TrialCalls:
    """Trials: list by knobs and metrics, read, measure again, cancel."""

    @route
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
    ) -> Call[TrialPage]:
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
        query = _trials(wanted, sort, descending=descending)
        edges = {"cursor": cursor, "before": before}
        return get(_path(campaign, "trials"), TrialPage, **query, limit=limit, **edges)

    @walk
    def trials(
        self,
        campaign: str,
        *,
        state: TrialState | None = None,
        wanted: TrialFilter | None = None,
        sort: SortKey | None = None,
        descending: bool = False,
    ) -> PagedCall[TrialPage, TrialRead]:
        """A campaign's trials, page after page; each that existed at the first page comes once.

        Args:
            campaign: its name or id.
            state: selects trials by state, instead of `wanted`.
            wanted: selects trials; None: all.
            sort: the sort key; None: their numbers.
            descending: whether the largest comes first.
        """
        if state is not None:
            wanted = TrialFilter(states=(state,))
        query = {**_trials(wanted, sort, descending=descending), "limit": PAGE}
        path = _path(campaign, "trials")
        return PagedCall(
            page=lambda cursor: get(path, TrialPage, cursor=cursor, **query),
            items=lambda page: page.trials,
        )

    @route
    def trial(self, trial_id: int) -> Call[TrialDetailRead]:
        """One trial with all that is stored about it."""
        return get(f"/trials/{trial_id}", TrialDetailRead)

    @route
    def trial_log(self, trial_id: int) -> Call[str]:
        """The last lines that a trial's ranks printed."""
        return get_text(f"/trials/{trial_id}/log")

    @route
    def repeat_trial(self, trial_id: int, *, times: int = 1) -> Call[TrialsAdded]:
        """Measures the layout of a COMPLETED trial again, this number of times."""
        return post(f"/trials/{trial_id}/repeat", TrialsAdded, {"times": times})

    @route
    def requeue_trial(self, trial_id: int) -> Call[TrialRead]:
        """Tries the layout of a FAILED, INFEASIBLE or CANCELLED trial once more."""
        return post(f"/trials/{trial_id}/requeue", TrialRead)

    @route
    def cancel_trial(self, trial_id: int) -> Call[TrialRead]:
        """Cancels a trial; a running one stays RUNNING until its worker has stopped it."""
        return post(f"/trials/{trial_id}/cancel", TrialRead)


class LeaderboardCalls:
    """A campaign's leaderboard, as documents or as a table."""

    @route
    def leaderboard(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        within: float | None = None,
        wanted: TrialFilter | None = None,
        sort: ListingSortKey | None = None,
        descending: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[LeaderboardPage]:
        """A page of the campaign's leaderboard.

        Args:
            campaign: its name or id.
            objective: what to rank by; None: the campaign's own objective.
            front: whether to list only the Pareto front over the campaign's objectives.
            within: lists only layouts at most this many percent below the best, cheapest first.
            wanted: selects layouts by their knobs and the measurements of their first trials.
            sort: a knob or metric to sort by; None: the rank.
            descending: whether the largest value of `sort` comes first.
            limit: most layouts of the page.
            offset: how many listed layouts come before the page.
        """
        order = _order(sort, descending=descending)
        query = {**_ranking(objective, front, within, wanted, limit, offset), **order}
        return get(_path(campaign, "leaderboard"), LeaderboardPage, **query)

    @route
    def leaderboard_csv(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        within: float | None = None,
        wanted: TrialFilter | None = None,
        sort: ListingSortKey | None = None,
        descending: bool = False,
        intervals: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[str]:
        """The same as a measurement table; `intervals` adds runs, intervals and ties."""
        order = _order(sort, descending=descending)
        query = {**_ranking(objective, front, within, wanted, limit, offset), **order}
        path = _path(campaign, "leaderboard")
        return get_text(path, **query, intervals=intervals or None, format="csv")

    @route
    def leaderboard_parquet(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        within: float | None = None,
        wanted: TrialFilter | None = None,
        sort: ListingSortKey | None = None,
        descending: bool = False,
        intervals: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[bytes]:
        """The table as a Parquet file."""
        order = _order(sort, descending=descending)
        query = {**_ranking(objective, front, within, wanted, limit, offset), **order}
        path = _path(campaign, "leaderboard")
        return get_bytes(path, **query, intervals=intervals or None, format="parquet")


class EventCalls:
    """Live events. An iteration has no end; a lost stream is opened again.

    `EventsMissedError` says that events after the given one are no longer stored.
    """

    @follow
    def events(self, *, after: int | None = None) -> Stream:
        """Events of all campaigns: from now on, or after the event of this number."""
        return Stream(path="/events", after=after)

    @follow
    def campaign_events(self, campaign: str, *, after: int | None = None) -> Stream:
        """Events of a campaign and its trials: from now on, or after the event of this number."""
        return Stream(path=_path(campaign, "events"), after=after)


def _path(campaign: str, part: str | None = None) -> str:
    path = f"/campaigns/{segment(campaign)}"
    return path if part is None else f"{path}/{part}"


def _campaigns(chosen: CampaignFilter) -> dict[str, Any]:
    after, before = chosen.created_after, chosen.created_before
    return {
        "state": list(chosen.states),
        "model": chosen.model,
        "cluster": chosen.cluster,
        "strategy": chosen.strategy,
        "objective": chosen.objective,
        "created_by": chosen.created_by,
        "name_contains": chosen.name_contains,
        "created_after": after and after.isoformat(),
        "created_before": before and before.isoformat(),
    }


def _trials(
    wanted: TrialFilter | None, sort: SortKey | None, *, descending: bool
) -> dict[str, Any]:
    stated = {} if wanted is None else filter_query(wanted)
    return {**stated, **_order(sort, descending=descending)}


def _order(sort: str | None, *, descending: bool) -> dict[str, str | None]:
    return {"sort": sort, "order": "desc" if descending else None}


def _ranking(
    objective: str | None,
    front: bool,
    within: float | None,
    wanted: TrialFilter | None,
    limit: int,
    offset: int,
) -> dict[str, Any]:
    return {
        **({} if wanted is None else filter_query(wanted)),
        "objective": objective,
        "front": front or None,
        "within": within,
        "limit": limit,
        "offset": offset,
    }


def _read_plan(answer: httpx.Response) -> Plan | PlanRead:
    """A plan, or what the driver has been asked for."""
    if answer.status_code == HTTPStatus.ACCEPTED:
        return reader_of(PlanRead)(answer)
    return reader_of(Plan)(answer)


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
