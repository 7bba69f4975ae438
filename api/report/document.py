"""The report: its head, its sections in order, its footer."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from api.report.facts import ReportFacts, facts_of
from api.report.markup import Markup, join, tag
from api.report.ranking import front, leaderboard, progress
from api.report.reproduction import reading, reproduction
from api.report.sensitivity import sensitivity
from api.report.spent import cost, environment, failures
from api.report.style import STYLE
from api.report.summary import header, summary, winner
from api.version import version
from results_db.records import CampaignRecord
from results_db.store import Store

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: a browser may only show a report. The file and the answer have it."""


def report(store: Store, campaign: CampaignRecord, made_at: datetime) -> str:
    """A campaign's report: HTML without scripts or external resources."""
    facts = facts_of(store, campaign, made_at)
    head = tag(
        "head",
        Markup(
            '<meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="robots" content="noindex">'
        ),
        tag("title", f"{facts.campaign.name}: layout-tuner report"),
        tag("style", Markup(STYLE)),
    )
    body = tag("body", tag("main", *_sections(facts)))
    return f'<!doctype html>\n<html lang="en">{join(head, body)}</html>\n'


def _sections(facts: ReportFacts) -> list[Markup]:
    return [
        header(facts),
        summary(facts),
        winner(facts),
        leaderboard(facts),
        front(facts),
        progress(facts),
        failures(facts),
        cost(facts),
        environment(facts),
        sensitivity(facts),
        reproduction(facts),
        reading(),
        tag(
            "footer",
            f"Made by layout-tuner {version()} on {facts.made_at:%Y-%m-%d} at {facts.made_at:%H:%M} "
            f"UTC, of campaign {facts.campaign.name} (id {facts.campaign.id}).",
        ),
    ]
