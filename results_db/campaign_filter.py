"""Which campaigns a list shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, String, cast, func, or_

from results_db.models import Campaign
from results_db.records import CampaignState


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFilter:
    """What campaigns must meet, all of it; None and the empty tuple ask nothing."""

    states: Sequence[CampaignState] = ()
    model: str | None = None
    """Name of the model."""
    cluster: str | None = None
    """Name of the cluster."""
    strategy: str | None = None
    objective: str | None = None
    """Any of the campaign's objectives."""
    created_by: str | None = None
    """Name of the token that submitted it."""
    name_contains: str | None = None
    """A part of the campaign's name, in upper or lower case."""
    created_after: datetime | None = None
    """This moment or later."""
    created_before: datetime | None = None
    """Earlier than this moment."""


EVERY_CAMPAIGN: Final = CampaignFilter()


def conditions(chosen: CampaignFilter) -> list[ColumnElement[bool]]:
    """The filter in SQL."""
    equal = {
        Campaign.model_name: chosen.model,
        Campaign.cluster_name: chosen.cluster,
        Campaign.strategy: chosen.strategy,
        Campaign.created_by: chosen.created_by,
    }
    found = [column == value for column, value in equal.items() if value is not None]
    if chosen.states:
        found.append(Campaign.state.in_(chosen.states))
    if chosen.objective is not None:
        found.append(_has_objective(chosen.objective))
    if chosen.name_contains is not None:
        # Lower case by hand: LIKE looks at case on PostgreSQL, and does not on SQLite.
        wanted = chosen.name_contains.lower()
        found.append(func.lower(Campaign.name).contains(wanted, autoescape=True))
    if chosen.created_after is not None:
        found.append(Campaign.created_at >= chosen.created_after)
    if chosen.created_before is not None:
        found.append(Campaign.created_at < chosen.created_before)
    return found


def _has_objective(name: str) -> ColumnElement[bool]:
    """The first objective has a column; the others stand in the description, in quotes."""
    listed = cast(Campaign.spec["objective"], String)
    return or_(Campaign.objective == name, listed.contains(f'"{name}"', autoescape=True))
