"""Which campaigns an owner may see: one condition, which every query in the owner's name gets.

What an owner may not see does not exist: queries find it no more than what was never there. An
owner sees the campaigns that are for everyone, the owner's own, and those that are for a group of
which the owner is a member at that moment. Administrators, workers and the service see all.

The condition is added to the tables below wherever a SELECT names them, in joins, subqueries and
aliases too. A query for other tables of a campaign (attempts, measurements) has to join one of
these, or to be asked for the id of a row that was found with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, SQLColumnExpression, and_, event, or_, select
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria
from sqlalchemy.sql.base import ExecutableOption

from layout_tuner.results_db.database.database import EYES_OF
from layout_tuner.results_db.models.service_tables import EventRow, GroupMember, PastUse, PlanRow
from layout_tuner.results_db.models.tables import AnalysisRow, Campaign, Import, Trial


def may_see(
    owner: str | SQLColumnExpression[str], table: type[Any] = Campaign
) -> ColumnElement[bool]:
    """Whether the owner may see a campaign; of the others, whether that of a deleted campaign."""
    of: Any = table  # all have the columns
    belongs = of.created_by if table is Campaign else of.owner
    return _is_seen(owner, of.visibility, belongs, of.group)


def _is_seen(
    owner: str | SQLColumnExpression[str], visibility: Any, belongs: Any, group: Any
) -> ColumnElement[bool]:
    """The condition on three columns of a table: who sees it, its owner, and its group."""
    groups = select(GroupMember.group_name).where(GroupMember.owner == owner)
    return or_(
        visibility == "everyone",
        belongs == owner,
        and_(visibility == "group", group.in_(groups)),
    )


@lru_cache(maxsize=64)
def _conditions(owner: str) -> tuple[ExecutableOption, ...]:
    """The conditions on all tables: 90 KiB. Without a cache each SELECT builds them in 1 ms."""
    # A table of its own: the condition of campaigns must not be added to it again.
    of = Campaign.__table__.alias("seen").c
    seen = select(of.id).where(_is_seen(owner, of.visibility, of.created_by, of.group_name))
    conditions: dict[type[Any], ColumnElement[bool]] = {
        Campaign: may_see(owner),
        Trial: Trial.campaign_id.in_(seen),
        AnalysisRow: AnalysisRow.campaign_id.in_(seen),
        Import: Import.campaign_id.in_(seen),
        EventRow: or_(EventRow.campaign_id.in_(seen), may_see(owner, EventRow)),
        PastUse: or_(PastUse.campaign_id.in_(seen), may_see(owner, PastUse)),
        PlanRow: PlanRow.created_by == owner,
    }
    return tuple(
        with_loader_criteria(table, condition, include_aliases=True)
        for table, condition in conditions.items()
    )


@event.listens_for(Session, "do_orm_execute")
def _hide(state: ORMExecuteState) -> None:
    if not state.is_select or state.is_column_load:
        return
    for owner in state.session.info.get(EYES_OF, ()):
        state.statement = state.statement.options(*_conditions(owner))
