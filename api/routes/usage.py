"""Usage: node-hours by owner, group, campaign or cluster."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from datetime import date, timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import Query, Response

from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.formatting import money_words
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.documents.duration import read_duration_s
from layout_tuner.documents.limits import begins_like_formula
from layout_tuner.documents.reading import shown
from layout_tuner.errors import CampaignInvalidError
from layout_tuner.predictions.statistics.job_duration import TrainingJob, read_tokens
from layout_tuner.results_db.service_records import UsageBy, UsageRead
from layout_tuner.results_db.store import Store

router = LazyRouter(prefix="/v1", tags=["usage"])

UsageText = Annotated[str, Query(max_length=32)]


_CSV: Final[dict[int | str, Any]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}


@router.get("/usage", response_model=UsageRead, responses=_CSV)
def read_usage(
    store: StoreDep,
    by: UsageBy = "owner",
    since: UsageText = "30d",
    until: UsageText = "",
    simulated: bool = False,
    tokens: UsageText = "1T",
    format: Literal["json", "csv"] = "json",  # noqa: A002 - the parameter's name in the URL
) -> UsageRead | Response:
    """Read the node-hours of a period, of measured campaigns, or of simulated ones.

    `since` and `until` are its first and its last day in UTC, such as 2026-11-01 or, so long ago,
    7d; it ends today by default. `tokens` are those of each tuned job, for what it saves.
    """
    found = usage_of(store, by, since, until, simulated=simulated, tokens=tokens)
    if format == "json":
        return found
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(found.total)), lineterminator="\n")
    writer.writeheader()
    for row in found.rows:
        sign = "'" if begins_like_formula(row.name or "") else ""
        cells = {"name": f"{sign}{row.name or ''}", "money": money_words(row.money)}
        writer.writerow(asdict(row) | cells)
    return Response(text.getvalue(), media_type="text/csv")


def usage_of(
    store: Store, by: UsageBy, since: str, until: str, *, simulated: bool, tokens: str
) -> UsageRead:
    """The usage in a period that texts describe; SearchSpaceError where one cannot be read."""
    today = store.now().date()
    first, last = _day("since", since, today), _day("until", until, today) if until else today
    if last < first:
        raise CampaignInvalidError(f"{last} is before {first}, the first day", field="until")
    job = TrainingJob(tokens=read_tokens(tokens))
    return store.usage.read(by, first, last, simulated=simulated, tokens=job.tokens)


def _day(name: str, text: str, today: date) -> date:
    try:
        if "-" not in text:
            return today - timedelta(seconds=read_duration_s(text, field=name))
        day = date.fromisoformat(text)
    except (ValueError, OverflowError, CampaignInvalidError) as error:
        why = f"{shown(text)} is neither a day such as 2026-11-01 nor as long ago as 7d"
        raise CampaignInvalidError(why, field=name) from error
    if day > today:
        raise CampaignInvalidError(f"{day} is in the future: today is {today}", field=name)
    return day
