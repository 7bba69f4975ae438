"""Forms that change a campaign or one of its trials; each answers with a page that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Final, Literal

from fastapi import Form, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import ValidationError

from layout_tuner.api.dashboard.campaign_page import ShowDep
from layout_tuner.api.dependencies import CampaignDep, OwnCampaignDep, StoreDep
from layout_tuner.api.html.rendering import campaign_path, go_to
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.routes.campaigns import SubmissionDep
from layout_tuner.api.routes.trials import TrialPath
from layout_tuner.api.schemas.campaigns_and_trials import CampaignChange
from layout_tuner.documents.numbers import read_number, read_whole
from layout_tuner.results_db.records import CampaignRecord, TrialRecord, Visibility
from layout_tuner.results_db.store import Store

router = LazyRouter(route_class=BodyRoute)

Back = Annotated[Literal["trial", "trials"], Form()]
"""The page that a form of a trial goes back to: the trial's, or the campaign's list."""

_Bound = Annotated[str, Form(max_length=40)]

_BOUNDS: Final = ("trials", "node_hours", "wall_time_s")


_STEERING: Final[Mapping[str, tuple[Callable[[Store, int], CampaignRecord], str]]] = {
    "pause": (lambda store, id_: store.campaigns.pause(id_), "paused"),
    "resume": (lambda store, id_: store.campaigns.resume(id_), "resumed"),
    "cancel": (lambda store, id_: store.campaigns.cancel(id_), "cancelled"),
}
_AGAIN: Final[Mapping[str, tuple[Callable[[Store, int], TrialRecord], str]]] = {
    "requeue": (lambda store, id_: store.trials.requeue(id_), "trial-requeued"),
    "repeat": (lambda store, id_: store.trials.measure_again(id_)[0], "trial-repeated"),
    "cancel": (lambda store, id_: store.trials.cancel(id_), "trial-cancelled"),
}
"""By the word in the address: the method of the store, and the message of the page."""


def _add_steering(word: str) -> None:
    change, done = _STEERING[word]

    @router.post(f"/campaigns/{{campaign}}/{word}", name=f"do_{word}_campaign")
    def _do(request: Request, campaign: OwnCampaignDep, store: StoreDep) -> Response:
        return _back(request, change(store, campaign.id), done)


def _add_change_of_trial(word: str) -> None:
    change, done = _AGAIN[word]

    @router.post(f"/trials/{{trial_id}}/{word}", name=f"do_{word}_trial")
    def _do(
        request: Request, trial_id: TrialPath, store: StoreDep, back: Back = "trials"
    ) -> Response:
        trial = change(store, trial_id)
        if back == "trial":
            return go_to(request, f"/trials/{trial.id}", done=done)
        path = campaign_path(request, store.campaigns.get(trial.campaign_id))
        return go_to(request, f"{path}/trials", done=done)


for _word in _STEERING:
    _add_steering(_word)
for _word in _AGAIN:
    _add_change_of_trial(_word)


@router.post("/campaigns/{campaign}/clone")
def do_clone_campaign(
    request: Request,
    campaign: CampaignDep,
    submission: SubmissionDep,
    name: Annotated[str, Form(max_length=64)],
) -> Response:
    clone, _is_replay = submission.clone(campaign, {"name": name}, None)
    return _back(request, clone, "cloned")


@router.post("/campaigns/{campaign}/change")
def do_change_campaign(
    request: Request,
    campaign: OwnCampaignDep,
    store: StoreDep,
    notes: Annotated[str, Form()] = "",
    trials: _Bound = "",
    node_hours: _Bound = "",
    wall_time_s: _Bound = "",
    visibility: Annotated[Visibility | None, Form()] = None,
    group: Annotated[str, Form(max_length=64)] = "",
    priority: Annotated[int | None, Form()] = None,
) -> Response:
    """Changes the notes of a campaign, who sees it, and its budget while it is open.

    A bound that is left empty is removed.
    """
    shared = {"visibility": visibility, "group": group or None, "priority": priority or 0}
    given = zip(_BOUNDS, (trials, node_hours, wall_time_s), strict=True)
    try:
        change = CampaignChange.model_validate(
            {
                "notes": notes.replace("\r\n", "\n"),  # browsers send line ends as CR LF
                "budget": {name: _number(value) for name, value in given},
                **({} if visibility is None else shared),
            }
        )
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    budget = {name: getattr(change.budget, name) for name in _BOUNDS}
    sharing = change.model_dump(exclude_unset=True, exclude={"budget", "notes"})
    changed = store.campaigns.update(
        campaign.id,
        budget=None if campaign.ended_at else budget,
        notes=change.notes,
        sharing=sharing,
    )
    return _back(request, changed, "changed")


@router.get("/campaigns/{campaign}/delete")
def show_delete_campaign(campaign: OwnCampaignDep, store: StoreDep, show: ShowDep) -> HTMLResponse:
    """The data that a deletion of a campaign removes, and the campaigns that depend on it."""
    return show(
        "campaign_delete.html",
        dependents=store.reports.campaigns_from(campaign.id),
        num_ranked=store.leaderboard.ranked_summary(campaign.id).num_ranked,
    )


@router.post("/campaigns/{campaign}/delete")
def do_delete_campaign(request: Request, campaign: OwnCampaignDep, store: StoreDep) -> Response:
    store.campaigns.delete(campaign.id)
    return go_to(request, "/", done="deleted")


def _number(text: str) -> int | float | str | None:
    """The number of a field of a form; None: it is empty. A text that is no number stays."""
    for read in (read_whole, read_number):
        with suppress(ValueError):
            return read(text)
    return text or None


def _back(request: Request, campaign: CampaignRecord, done: str) -> Response:
    return go_to(request, campaign_path(request, campaign), done=done)
