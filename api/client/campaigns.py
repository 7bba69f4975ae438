"""Calls about campaigns: submitted, imported, steered, read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from api.client.call import (
    IDEMPOTENCY_KEY,
    PAGE,
    Call,
    Listing,
    get,
    get_text,
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
from results_db.records import CampaignState


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
        states: Sequence[CampaignState] = (),
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[CampaignPage]:
        """A page of the list of campaigns, the youngest first: all, or those in these states."""
        return get("/campaigns", CampaignPage, state=list(states), limit=limit, cursor=cursor)

    @walk
    def campaigns(
        self, *, states: Sequence[CampaignState] = ()
    ) -> Listing[CampaignPage, CampaignRead]:
        """Every campaign, the youngest first: all, or those in these states."""
        query = {"state": list(states), "limit": PAGE}
        return Listing(
            page=lambda cursor: get("/campaigns", CampaignPage, cursor=cursor, **query),
            items=lambda page: page.campaigns,
        )

    @route
    def campaign(self, campaign: str) -> Call[CampaignDetail]:
        """One campaign, by its name or id."""
        return get(f"/campaigns/{segment(campaign)}", CampaignDetail)

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
