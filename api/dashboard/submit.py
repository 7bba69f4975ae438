"""The page that submits a campaign: a form and its YAML, checked while a user types."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal
from uuid import uuid4

from fastapi import Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from layout_tuner.api.campaigns.named_models_and_clusters import PRESET_NAMES
from layout_tuner.api.campaigns.submission import Submission
from layout_tuner.api.campaigns.submission_check import (
    COUNTED_WITHIN_S,
    SubmissionCheck,
    check_submission,
)
from layout_tuner.api.dashboard.campaign_form import (
    FORM_FIELDS,
    REST,
    document_of,
    form_of,
    like_campaign,
    yaml_of,
)
from layout_tuner.api.dashboard.job_form import JobForm
from layout_tuner.api.dependencies import StoreDep, get_campaign
from layout_tuner.api.errors import ApiError
from layout_tuner.api.html.rendering import campaign_path, go_to, render
from layout_tuner.api.http.body_limits import limits_of
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.routes.campaigns import SubmissionDep
from layout_tuner.api.schemas.campaigns_and_trials import CampaignChange
from layout_tuner.documents.json_and_yaml import read_json, read_yaml
from layout_tuner.errors import CampaignInvalidError, DocumentMalformedError, SearchSpaceError
from layout_tuner.predictions.belief.plan import Plan
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.records import PlanRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign_settings import BENCHMARK_STRATEGIES, STRATEGIES
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.objectives import ALL_OBJECTIVES
from layout_tuner.search_spaces.spaces.space_presets import SPACE_PRESETS
from layout_tuner.units import memory

router = LazyRouter(route_class=BodyRoute)

View = Literal["form", "yaml"]

YAML: Final = "yaml"
_SHARING: Final = ("visibility", "group", "priority")
_BESIDE: Final = (YAML, "view", "do", "key", *_SHARING)
"""Fields of the page that are not of the form of a campaign."""
PLANNED_ROWS: Final = 5
"""Layouts of a plan that the page shows."""
_DEFAULTS: Final = {"strategy": "guided", "budget": {"trials": 50}}
"""What the form of a new campaign begins with."""
_WRONG_DOCUMENT: Final = (SearchSpaceError, ApiError)
_NamedInUrl = Annotated[str, Query(max_length=64)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitPage:
    """The page with the user's input."""

    request: Request
    store: Store
    submission: Submission
    form: dict[str, str]
    """The fields of the form by name; `view` is the view that they are of."""
    job: JobForm = field(default_factory=JobForm)
    """The form for the files of a job."""

    def show(
        self,
        check: SubmissionCheck | None = None,
        *,
        is_checked: bool = True,
        plan: Plan | PlanRecord | None = None,
    ) -> Response:
        """The page with the result of the check, and with a plan where there is one."""
        if check is None and is_checked:
            check = self.check()
        own = {
            kind: [record.name for record in self.store.catalogue.find(kind)]
            for kind in PRESET_NAMES
        }
        return render(
            self.request,
            "submit.html",
            form=self.form,
            job=self.job,
            sent=self.request.method == "POST",
            models=[*PRESET_NAMES["model"], *own["model"]],
            clusters=[*PRESET_NAMES["cluster"], *own["cluster"]],
            spaces=list(SPACE_PRESETS),
            objectives=ALL_OBJECTIVES,
            strategies=[
                name
                for name in STRATEGIES
                if name not in BENCHMARK_STRATEGIES or name == self.form["strategy"]
            ],
            knobs=KNOBS.values(),
            plan=plan,
            groups=list(self.store.owners.groups_of(self.request.state.holder.owner)),
            **self.findings(check),
        )

    def plan(self) -> Response:
        """Shows the best layouts by predictions; nothing is submitted."""
        check = self.check()
        if check.problems:
            return self.show(check)
        try:
            options = PlanOptions(top=PLANNED_ROWS)
            plan = self.submission.plan(self._document(), options, by_driver=False)
        except (*_WRONG_DOCUMENT, ResultsDbError) as error:
            return self.show(_refused(error))
        return self.show(check, plan=plan)

    def turn(self) -> Response:
        """Shows the document in the other view; one that cannot be read stays in its view."""
        page = self
        with suppress(*_WRONG_DOCUMENT):
            document = self._document()
            if isinstance(document, dict):
                kept = {name: self.form[name] for name in _SHARING}
                page = replace(self, form=fields_of(document, self.form["do"]) | kept)
        return page.show()

    def open(self) -> Response:
        """Shows a file as YAML, as it stands."""
        return replace(self, form={**self.form, "view": YAML, YAML: self.form["file"]}).show()

    def submit(self) -> Response:
        """Makes the campaign and goes to its page."""
        try:
            document = self._document()
            given = {k: self.form[k] for k in _SHARING if self.form[k]}
            changes = CampaignChange.model_validate_strings(given).model_dump(exclude_unset=True)
            self.submission.sharing = replace(self.submission.sharing, **changes)
            campaign, _ = self.submission.create(document, _request_key(self.form, document))
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        except (*_WRONG_DOCUMENT, ResultsDbError) as error:
            check = self.check()
            return self.show(check if check.problems else _refused(error))
        return go_to(self.request, campaign_path(self.request, campaign))

    def check(self) -> SubmissionCheck:
        """What is wrong with the document, and how many layouts its space has."""
        try:
            document = self._document()
        except _WRONG_DOCUMENT as error:
            return _refused(error)
        return check_submission(self.submission, document)

    def findings(self, check: SubmissionCheck | None) -> dict[str, Any]:
        """Variables of the part of the page that shows a check."""
        errors: dict[str, list[str]] = {}
        for problem in check.problems if check else ():
            errors.setdefault(self._input_of(problem.field), []).append(problem.problem)
        return {
            "check": check,
            "errors": errors,
            "input_of": self._input_of,
            "counted_within_s": COUNTED_WITHIN_S,
        }

    def _input_of(self, field: str) -> str:
        if self.form["view"] == YAML:
            return YAML
        field = {"space": "space.preset", "budget": "budget.trials"}.get(field, field)
        while field not in FORM_FIELDS and "." in field:
            field = field.rpartition(".")[0]
        return field if field in FORM_FIELDS else REST

    def _document(self) -> Any:
        """The form's document; SearchSpaceError where a text is no YAML or too long."""
        if self.form["view"] != YAML:
            return document_of(self.form)
        text, most = self.form[YAML], limits_of("create_campaign").num_bytes
        body = text.encode("utf-8", "backslashreplace")
        if len(body) > most:
            raise CampaignInvalidError(f"the document is longer than the most, {memory(most)}")
        if text.lstrip().startswith("{"):
            # JSON with tabs is no YAML.
            with suppress(DocumentMalformedError):
                return read_json(body)
        return read_yaml(body)


async def _page_of(request: Request, store: StoreDep, submission: SubmissionDep) -> SubmitPage:
    """The page that sent a form; of a file its text."""
    form = dict.fromkeys((*FORM_FIELDS, *_BESIDE, "file"), "")
    for name, value in (await request.form()).multi_items():
        if isinstance(value, UploadFile):
            file, value = value, (await value.read()).decode("utf-8-sig", "backslashreplace")
            await file.close()
        if name in (YAML, REST, "file"):
            form[name] = value
        elif name in form and value.strip():
            # Boxes and lists of one name: several values.
            form[name] = ", ".join(filter(None, (form[name], value.strip())))
    form["view"] = form["view"] or "form"
    return SubmitPage(request=request, store=store, submission=submission, form=form)


SubmitPageDep = Annotated[SubmitPage, Depends(_page_of)]


@router.get("/submit")
def show_submit(
    request: Request,
    store: StoreDep,
    submission: SubmissionDep,
    campaign: _NamedInUrl = "",
    model: _NamedInUrl = "",
    cluster: _NamedInUrl = "",
    space: _NamedInUrl = "",
    view: View = "form",
) -> Response:
    """A form for a new campaign, or for one like another campaign."""
    given = {"model": model, "cluster": cluster, "space": space}
    document: dict[str, Any] = _DEFAULTS | {name: value for name, value in given.items() if value}
    if campaign:
        original = get_campaign(campaign, store)
        document = like_campaign(store, original, submission.free_name(original.name))
    page = SubmitPage(
        request=request, store=store, submission=submission, form=fields_of(document, view)
    )
    return page.show(is_checked=bool(campaign) or any(given.values()))


@router.post("/submit")
def do_submit(page: SubmitPageDep) -> Response:
    """Submits the campaign, plans or checks it, opens a file, or shows the other view."""
    act = {
        "submit": page.submit,
        "plan": page.plan,
        "form": page.turn,
        YAML: page.turn,
        "open": page.open,
    }
    return act.get(page.form["do"], page.show)()


@router.post("/submit/check")
def do_check(page: SubmitPageDep) -> HTMLResponse:
    """The part of the page about errors and legal layouts, while a user types."""
    return render(page.request, "submit_check.html", **page.findings(page.check()))


def fields_of(document: dict[str, Any], view: str) -> dict[str, str]:
    """The fields of a page for a document, in a view."""
    fields = {YAML: yaml_of(document)} if view == YAML else form_of(document)
    return dict.fromkeys((*FORM_FIELDS, *_BESIDE), "") | fields | {"view": view, "key": uuid4().hex}


def _request_key(form: dict[str, str], document: Any) -> str:
    """The same for each press of the button with the same content, and for no other page."""
    written = json.dumps([form["key"], document], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()


def _refused(error: Exception) -> SubmissionCheck:
    if not isinstance(error, SearchSpaceError):
        error = CampaignInvalidError(str(error))
    return SubmissionCheck(problems=error.parts, warnings=(), counts=None)
