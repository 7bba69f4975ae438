"""Calls about campaigns: submitted, imported, steered, read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from api.client.call import (
    IDEMPOTENCY_KEY,
    PAGE,
    Call,
    Listing,
    delete,
    get,
    get_text,
    patch,
    post,
    reader_of,
    segment,
)
from api.client.route import route, walk
from api.schemas import (
    AnalysisRead,
    CampaignDetail,
    CampaignPage,
    CampaignRead,
    ExportRead,
    ImportRead,
)
from results_db.campaign_filter import EVERY_CAMPAIGN, CampaignFilter

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class CampaignCalls:
    """What can be asked about campaigns."""

    @route
    def create_campaign(
        self, document: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[CampaignDetail]:
        """Submits a campaign.

        Sent again where no answer came: its key tells the service that it is the same one.

        Args:
            document: its description.
            idempotency_key: with which the same submission may be asked for again later; None: a new one.
        """
        return Call(
            method="POST",
            path="/v1/campaigns",
            read=reader_of(CampaignDetail),
            json=document,
            headers={IDEMPOTENCY_KEY: idempotency_key or str(uuid.uuid4())},
            is_repeatable=True,
        )

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
        """A page of the list of campaigns, the youngest first: all, or those that a filter chooses."""
        return get("/campaigns", CampaignPage, **_query(chosen), limit=limit, cursor=cursor)

    @walk
    def campaigns(
        self, chosen: CampaignFilter = EVERY_CAMPAIGN
    ) -> Listing[CampaignPage, CampaignRead]:
        """Campaigns, the youngest first: all, or those that a filter chooses."""
        query = {**_query(chosen), "limit": PAGE}
        return Listing(
            page=lambda cursor: get("/campaigns", CampaignPage, cursor=cursor, **query),
            items=lambda page: page.campaigns,
        )

    @route
    def campaign(self, campaign: str) -> Call[CampaignDetail]:
        """One campaign, by its name or id."""
        return get(f"/campaigns/{segment(campaign)}", CampaignDetail)

    @route
    def clone_campaign(
        self,
        campaign: str,
        changes: Mapping[str, Any] = NOTHING,
        *,
        idempotency_key: str | None = None,
    ) -> Call[CampaignDetail]:
        """Submits a campaign like another one. Sent again as `create_campaign` is.

        Args:
            campaign: the other one.
            changes: fields of its document, each in place of the other's; without a name it gets one.
            idempotency_key: with which the same clone may be asked for again later; None: a new one.
        """
        return Call(
            method="POST",
            path=f"/v1/campaigns/{segment(campaign)}/clone",
            read=reader_of(CampaignDetail),
            json=dict(changes),
            headers={IDEMPOTENCY_KEY: idempotency_key or str(uuid.uuid4())},
            is_repeatable=True,
        )

    @route
    def update_campaign(
        self, campaign: str, *, budget: Mapping[str, Any] | None = None, notes: str | None = None
    ) -> Call[CampaignDetail]:
        """Changes the budget of a campaign that has not ended, and its notes.

        Args:
            campaign: which one.
            budget: bounds by name: one that is not there stays, None takes one away.
            notes: in place of those that were there; None: they stay.
        """
        given = {"budget": budget, "notes": notes}
        changes = {name: value for name, value in given.items() if value is not None}
        return patch(f"/campaigns/{segment(campaign)}", CampaignDetail, changes)

    @route
    def delete_campaign(self, campaign: str) -> Call[None]:
        """Deletes a campaign that has ended, with all that was measured for it."""
        return delete(f"/campaigns/{segment(campaign)}")

    @route
    def report(self, campaign: str) -> Call[str]:
        """The campaign as one HTML document that loads nothing and runs nothing."""
        return get_text(f"/campaigns/{segment(campaign)}/report")

    @route
    def pause_campaign(self, campaign: str) -> Call[CampaignDetail]:
        """Hands out no more of its trials."""
        return post(f"/campaigns/{segment(campaign)}/pause", CampaignDetail)

    @route
    def resume_campaign(self, campaign: str) -> Call[CampaignDetail]:
        """Takes it up again."""
        return post(f"/campaigns/{segment(campaign)}/resume", CampaignDetail)

    @route
    def cancel_campaign(self, campaign: str) -> Call[CampaignDetail]:
        """Ends it now."""
        return post(f"/campaigns/{segment(campaign)}/cancel", CampaignDetail)

    @route
    def table(self, campaign: str) -> Call[str]:
        """All that a campaign measured, as a measurement table."""
        return get_text(f"/campaigns/{segment(campaign)}/table")

    @route
    def analysis(self, campaign: str) -> Call[AnalysisRead]:
        """Which of the campaign's knobs matter, and what a step in each would do."""
        return get(f"/campaigns/{segment(campaign)}/analysis", AnalysisRead)

    @route
    def export(
        self, campaign: str, format_name: str, *, trial: int | None = None
    ) -> Call[ExportRead]:
        """The files of a training job, for the best trial or another one."""
        path = f"/campaigns/{segment(campaign)}/exports"
        return get(path, ExportRead, format=format_name, trial=trial)


def _query(chosen: CampaignFilter) -> dict[str, Any]:
    moments = {
        name: None if moment is None else moment.isoformat()
        for name, moment in (
            ("created_after", chosen.created_after),
            ("created_before", chosen.created_before),
        )
    }
    return {
        "state": list(chosen.states),
        "model": chosen.model,
        "cluster": chosen.cluster,
        "strategy": chosen.strategy,
        "objective": chosen.objective,
        "created_by": chosen.created_by,
        "name_contains": chosen.name_contains,
        **moments,
    }
