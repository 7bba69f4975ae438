"""The page that compares trials: knobs, figures, parts of the step and memory side by side."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from api.dashboard.drawings.bars import keys, stacked
from api.dashboard.rendering import render
from api.dashboard.trial_facts import TrialFacts, knob_text
from api.dependencies import StoreDep
from api.schemas.text_types import id_in
from api.service.formatting import state_words
from search_spaces.protocol.worker_messages import TrialId
from search_spaces.spec.layout import KNOBS

FEWEST: Final = 2
MOST: Final = 6
"""Trials that are compared at once."""

_OWN: Final = ("trial", "measured")
"""Figures in which trials always differ."""

router = APIRouter()


class Row(NamedTuple):
    """A line of a comparison."""

    name: str
    values: list[str]

    @property
    def differs(self) -> bool:
        """Whether the trials differ in it."""
        return len(set(self.values)) > 1


@router.get("/compare", include_in_schema=False)
def show_trial_comparison(
    request: Request,
    store: StoreDep,
    trial: Annotated[list[TrialId] | None, Query(max_length=100)] = None,
    trials: Annotated[str, Query(max_length=200, pattern=r"^[0-9 ,]*$")] = "",
) -> HTMLResponse:
    """Two to six trials side by side.

    Their ids are in several `trial`, or in one `trials`, which the form sends.
    """
    typed = [number for word in trials.replace(",", " ").split() if (number := id_in(word))]
    asked = list(dict.fromkeys((*(trial or ()), *typed)))
    compared, problem = [], None
    if FEWEST <= len(asked) <= MOST:
        compared = [TrialFacts.of(store, trial_id) for trial_id in asked]
    elif asked:
        were = "trial was" if len(asked) == 1 else "trials were"
        problem = f"{len(asked)} {were} named; a comparison has {FEWEST} to {MOST}."
    whole = max((sum(max(p.size, 0.0) for p in facts.parts) for facts in compared), default=0.0)
    top = max(
        (
            number
            for facts in compared
            for number in (
                *facts.measured_bytes,
                *facts.estimated_bytes,
                facts.device_memory_bytes or 0,
            )
        ),
        default=0,
    )
    return render(
        request,
        "compare.html",
        asked=asked,
        problem=problem,
        status=HTTPStatus.UNPROCESSABLE_ENTITY if problem else HTTPStatus.OK,
        trials=compared,
        knobs=_knobs(compared) if compared else [],
        figures=_figures(compared) if compared else [],
        bars=[
            (facts, stacked(facts.parts, whole=whole), keys(facts.parts))
            for facts in compared
            if facts.parts
        ],
        memories=[(facts, drawn) for facts in compared if (drawn := facts.memory(top_bytes=top))],
    )


def _knobs(trials: list[TrialFacts]) -> list[Row]:
    """Every knob that is not at its default in all of them."""
    layouts = [facts.trial.layout for facts in trials]
    rows = [
        Row(knob.label, [knob_text(layout, knob.name) for layout in layouts])
        for knob in KNOBS.values()
        if knob.is_shown
        and (knob.heading or any(getattr(each, knob.name) != knob.default for each in layouts))
    ]
    return [*rows, Row("global batch", [str(layout.global_batch_size) for layout in layouts])]


def _figures(trials: list[TrialFacts]) -> list[Row]:
    """What they measured, and what they are."""
    told = [dict(facts.figures) for facts in trials]
    names = dict.fromkeys(name for each in told for name in each if name not in _OWN)
    ranks = ["-" if facts.ranked is None else str(facts.ranked.rank) for facts in trials]
    return [
        Row("campaign", [facts.campaign.name for facts in trials]),
        Row("state", [state_words(facts.trial.state, facts.trial.reason) for facts in trials]),
        Row("rank", ranks),
        *(Row(name, [each.get(name, "-") for each in told]) for name in names),
    ]
