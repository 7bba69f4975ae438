"""Errors as RFC 9457 problem documents; the one table of HTTP status codes."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from api import errors as api_errors
from api.exporters import base as exporters
from api.schemas import FieldError, Problem
from results_db import errors as db_errors
from search_spaces import errors as space_errors

MEDIA_TYPE: Final = "application/problem+json"

STATUS_OF: Final[dict[type[Exception], HTTPStatus]] = {
    api_errors.DocumentMalformedError: HTTPStatus.BAD_REQUEST,
    api_errors.DocumentTooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    api_errors.PageInvalidError: HTTPStatus.BAD_REQUEST,
    api_errors.QueryUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    api_errors.DocumentTypeUnsupportedError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    api_errors.WatchersTooManyError: HTTPStatus.SERVICE_UNAVAILABLE,
    api_errors.EventNumberInvalidError: HTTPStatus.BAD_REQUEST,
    api_errors.ExportUnavailableError: HTTPStatus.CONFLICT,
    api_errors.CampaignOwnedError: HTTPStatus.FORBIDDEN,
    api_errors.PresetFixedError: HTTPStatus.CONFLICT,
    api_errors.AnalysisUnavailableError: HTTPStatus.NOT_FOUND,
    db_errors.CampaignNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TrialNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TrialLogNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.WorkerNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.WorkerSupersededError: HTTPStatus.CONFLICT,
    db_errors.CampaignDuplicateError: HTTPStatus.CONFLICT,
    db_errors.CampaignStateError: HTTPStatus.CONFLICT,
    db_errors.IdempotencyKeyReusedError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.IdempotencyKeyInUseError: HTTPStatus.CONFLICT,
    db_errors.DescriptionNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.DescriptionOwnedError: HTTPStatus.FORBIDDEN,
    db_errors.DescriptionLimitError: HTTPStatus.CONFLICT,
    db_errors.TrialDuplicateError: HTTPStatus.CONFLICT,
    db_errors.TrialStateError: HTTPStatus.CONFLICT,
    db_errors.AttemptNotFoundError: HTTPStatus.CONFLICT,
    db_errors.NodeNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.NodeStateError: HTTPStatus.CONFLICT,
    db_errors.TokenNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TokenDuplicateError: HTTPStatus.CONFLICT,
    db_errors.TokenInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.MeasurementInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.TrialFilterInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.ObjectiveUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.ValueUnstorableError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.ListingInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.DatabaseUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    space_errors.SearchSpaceError: HTTPStatus.UNPROCESSABLE_ENTITY,
    exporters.ExportFormatUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    exporters.ExportImpossibleError: HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""What each of our errors is over HTTP; an error that is not here is a fault of ours."""


def problem_response(
    status: int,
    detail: str,
    *,
    kind: str | None = None,
    errors: list[FieldError] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """A problem document as an answer.

    `kind` is the last part of its type, as "campaign-duplicate"; without one it is named after the
    status.
    """
    title = HTTPStatus(status).phrase
    problem = Problem(
        type=f"urn:layout-tuner:problem:{kind or _kebab(title)}",
        title=kind.replace("-", " ") if kind else title.lower(),
        status=status,
        detail=_printable(detail),
        errors=errors,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=status,
        headers=headers,
        media_type=MEDIA_TYPE,
    )


def install(app: FastAPI) -> None:
    """Makes every error of the application a problem document."""
    for known in STATUS_OF:
        app.add_exception_handler(known, _known_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)


async def names_fields_of_body(request: Request) -> None:
    """A dependency of routes that read a campaign's document: the fields that a refusal names are the body's."""
    request.state.names_fields_of_body = True


def _known_error(request: Request, error: Exception) -> Response:
    status = next(STATUS_OF[base] for base in type(error).__mro__ if base in STATUS_OF)
    # Whoever asks again at once would find the database as it is.
    headers = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return problem_response(
        status, str(error), kind=_kind(error), errors=_fields_of(request, error), headers=headers
    )


def _fields_of(request: Request, error: Exception) -> list[FieldError] | None:
    """The field that an error is about, where it is one of the request."""
    is_of_body = getattr(request.state, "names_fields_of_body", False)
    if not (is_of_body and isinstance(error, space_errors.SearchSpaceError) and error.field):
        return None
    field, problem = _printable(f"body.{error.field}"), _printable(error.problem)
    return [FieldError(field=field, message=problem)]


def _kind(error: Exception) -> str:
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def _kebab(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")


def _printable(text: str) -> str:
    """What a client sent may be no text at all (half of a surrogate pair); the answer must be."""
    return text.encode("utf-8", "backslashreplace").decode()


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {_printable(request.url.path)}; /docs lists what there is"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible here; /docs lists what is"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework names the methods of one route only; a path may have several.
        headers["Allow"] = ", ".join(request.app.state.routes.methods(request.url.path))
    return problem_response(error.status_code, detail, headers=headers or None)


def _invalid_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found and found[0]["type"] == "json_invalid":
        return problem_response(
            HTTPStatus.BAD_REQUEST,
            _where_json_broke(error.body, found[0]),
            kind="document-malformed",
        )
    fields = [
        FieldError(
            field=_printable(".".join(str(part) for part in entry["loc"])),
            message=entry["msg"].removeprefix("Value error, "),
        )
        for entry in found[:20]
    ]
    detail = "; ".join(f"{entry.field}: {entry.message}" for entry in fields[:3])
    if len(found) > 3:
        detail += f"; and {len(found) - 3} more"
    return problem_response(
        HTTPStatus.UNPROCESSABLE_ENTITY, detail, kind="request-invalid", errors=fields
    )


def _where_json_broke(body: Any, entry: dict[str, Any]) -> str:
    position = int(entry["loc"][1])
    before = body[:position] if isinstance(body, str) else ""
    line = before.count("\n") + 1
    column = position - (before.rfind("\n") + 1) + 1
    return f"malformed JSON at line {line}, column {column}: {entry['ctx']['error']}"


def _fault(_request: Request, _error: Exception) -> Response:
    # The traceback goes to the service's log, not to the client.
    return problem_response(
        HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the service; its log has the details"
    )
