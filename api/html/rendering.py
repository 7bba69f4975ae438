"""Renders pages: templates, their filters, and the headers that every page has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.datastructures import QueryParams

from layout_tuner.api.campaigns.progress_and_waiting import node_seconds_left
from layout_tuner.api.formatting import (
    cheap_count_words,
    duration,
    figure,
    memory,
    moment,
    node_time,
    objective_figure,
    percent,
    seen_by,
    state_words,
    step_words,
    unit,
    used_words,
)
from layout_tuner.api.html.assets import assets, maplibre_style_id
from layout_tuner.api.html.result_sentences import peak_words, short_layout
from layout_tuner.api.plots.svg import visible
from layout_tuner.api.ranked_columns import COLUMNS
from layout_tuner.api.security.holders import Holder
from layout_tuner.documents.reading import word_of
from layout_tuner.predictions.belief.plan_parts.comparison_text import (
    comparison_tables,
    comparison_words,
)
from layout_tuner.predictions.belief.plan_text import (
    PLAN_COLUMNS,
    baseline_words,
    bought_words,
    chances_words,
    gain_words,
    head_words,
    jobs_words,
    knowledge_words,
    refusal_words,
)
from layout_tuner.predictions.statistics.disturbance import MEANING
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.records import EVENT_KINDS, CampaignRecord, ProbeCount
from layout_tuner.search_spaces.layouts.knobs import auto_words, searched_words
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.terminal.plurals import capitalised
from layout_tuner.version import version

PAGE_HEADERS: Final[Mapping[str, str]] = {
    # No inline script and no inline style: names and logs come from outside.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; worker-src 'self'; img-src 'self' data: blob:; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    # With no-referrer, a browser would send "Origin: null" with forms.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "private, no-cache",
    "Vary": "Cookie, Authorization",
}

_NAME_IN_PATHS: Final = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")


def render(
    request: Request, template: str, /, *, status: HTTPStatus = HTTPStatus.OK, **context: Any
) -> HTMLResponse:
    """A page.

    Args:
        request: the request that the page answers.
        template: a file of `api/html/templates`.
        status: the HTTP status of the response.
        context: variables of the template. Each template also has `holder` (the name and role of
            the token; None: not signed in), `path` (of the request, without the URL prefix),
            `query` (its parameters), `done` (the code of what the last form did, in its
            parameter of this name), `status`, `url`, `here`, `asset`
            and `campaign_path` (functions) and `version`.
    """
    prefix = request.scope.get("root_path", "")
    shared = {
        "holder": getattr(request.state, "holder", None),
        "csrf_token": getattr(request.state, "csrf_token", ""),
        "path": request.url.path.removeprefix(prefix),
        "query": request.query_params,
        "done": request.query_params.get("done"),
        "status": int(status),
        "version": version(),
        "event_kinds": " ".join(EVENT_KINDS),
        "url": lambda path, **query: _url(prefix, path, query),
        "here": lambda **changes: _url(
            prefix, request.url.path.removeprefix(prefix), _changed(request.query_params, changes)
        ),
        "campaign_path": partial(campaign_path, request),
        "asset": lambda name: prefix + assets()[name].path,
        "maplibre_style_id": maplibre_style_id,
    }
    html = document(template, **(shared | context))
    return HTMLResponse(html, status_code=status, headers=dict(PAGE_HEADERS))


def document(template: str, /, **context: Any) -> str:
    """A template with its variables, as HTML; for documents that are no pages of the service."""
    return _environment().get_template(template).render(context)


def campaign_path(request: Request, campaign: CampaignRecord) -> str:
    """The path of a campaign's page: with its name if it is the reader's own, or was asked for so.

    Others are named by their ids, since several that a reader sees may have one name; so are old
    campaigns, whose names may have any characters.
    """
    holder: Holder | None = getattr(request.state, "holder", None)
    is_own = holder is not None and campaign.created_by == holder.owner
    is_found = is_own or request.path_params.get("campaign") == campaign.name
    by_name = is_found and _NAME_IN_PATHS.fullmatch(campaign.name)
    return f"/campaigns/{campaign.name if by_name else campaign.id}"


def go_to(request: Request, path: str, /, **query: Any) -> RedirectResponse:
    """The answer to a form: the browser goes on to a page of this service."""
    return RedirectResponse(page_url(request, path, **query), HTTPStatus.SEE_OTHER)


def page_url(request: Request, path: str, /, **query: Any) -> str:
    """A link to a page of this service, for redirects; parameters that are None are left out."""
    return _url(request.scope.get("root_path", ""), path, query)


def _url(prefix: str, path: str, query: Mapping[str, Any]) -> str:
    """A link to a page of this service; parameters that are None are left out."""
    asked = {name: value for name, value in query.items() if value is not None}
    words = f"?{urlencode(asked, doseq=True)}" if asked else ""
    return prefix + quote(path) + words


def _changed(query: QueryParams, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a page with some of them changed; None leaves one out."""
    kept = {name: query.getlist(name) for name in query if name != "done"}
    return {**kept, **changes}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("layout_tuner.api.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {each.__name__: each for each in _FILTERS}
    environment.globals |= {
        "zip": zip,
        "disturbed_meaning": MEANING,
        "KNOBS": KNOBS,
        "COLUMNS": COLUMNS,
        "METRICS": METRICS,
        "PLAN_COLUMNS": PLAN_COLUMNS,
    }
    return environment


def cheap_words(probes: ProbeCount) -> str:
    return cheap_count_words(probes.number, probes.node_seconds)


def count(number: int, thing: str = "") -> str:
    """A number with its thousands apart, and a noun, which gets an s unless the number is 1."""
    noun = f" {thing}{'s' if number != 1 else ''}" if thing else ""
    return f"{number:,}{noun}"


def labelled(row: Markup, columns: Sequence[str]) -> Markup:
    """A row of a table, each cell with the heading of its column, which small screens show."""
    headings = (escape(escape(name.removeprefix(">")).striptags()) for name in columns)
    written = re.sub(
        "<t[dh](?=[ >])", lambda cell: f'{cell[0]} data-label="{next(headings, "")}"', row
    )
    return Markup(written)  # noqa: S704 - the row and the headings are escaped


def timestamp(at: datetime | None) -> Markup:
    """A moment as a `time` element: the script shows it in the reader's time zone."""
    if at is None:
        return Markup("-")
    words = Markup('<time datetime="{}">{}</time>')
    return words.format(at.astimezone(UTC).isoformat(timespec="seconds"), moment(at))


_FILTERS: Final[tuple[Callable[..., Any], ...]] = (
    *(seen_by, node_seconds_left, peak_words, short_layout, knowledge_words, auto_words),
    searched_words,
    *(chances_words, duration, figure, memory, objective_figure, node_time, percent, state_words),
    *(step_words, unit, used_words, cheap_words, count, labelled, timestamp, word_of),
    *(head_words, baseline_words, refusal_words, bought_words, gain_words, jobs_words),
    *(comparison_words, comparison_tables, capitalised),
)
"""Functions that are filters of the templates under their own names."""
