"""A filter of campaigns in SQL."""

from __future__ import annotations

from sqlalchemy import ColumnElement, String, cast, func, or_

from results_db.campaign_filter import CampaignFilter
from results_db.models import Campaign


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
