"""Errors as problem documents (RFC 9457), and the table of their HTTP status codes."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from layout_tuner import errors as space_errors
from layout_tuner.api import errors as api_errors
from layout_tuner.api.http.url_prefix import route_path
from layout_tuner.api.schemas.campaigns_and_trials import FieldError, Problem
from layout_tuner.results_db import errors as db_errors
from layout_tuner.trainers.exports import export_source as exporters

MEDIA_TYPE: Final = "application/problem+json"

STATUS_OF: Final[dict[type[Exception], HTTPStatus]] = {
    api_errors.PageInvalidError: HTTPStatus.BAD_REQUEST,
    api_errors.QueryUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    api_errors.DocumentTypeUnsupportedError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    api_errors.WatchersTooManyError: HTTPStatus.SERVICE_UNAVAILABLE,
    api_errors.EventNumberInvalidError: HTTPStatus.BAD_REQUEST,
    api_errors.ExportUnavailableError: HTTPStatus.CONFLICT,
    api_errors.TableFormatUnavailableError: HTTPStatus.NOT_IMPLEMENTED,
    api_errors.CampaignOwnedError: HTTPStatus.FORBIDDEN,
    api_errors.FormTokenInvalidError: HTTPStatus.FORBIDDEN,
    api_errors.SignInCodeSourceError: HTTPStatus.FORBIDDEN,
    db_errors.DeviceSignInRefusedError: HTTPStatus.BAD_REQUEST,
    api_errors.SignInRefusedError: HTTPStatus.UNAUTHORIZED,
    api_errors.SignInOwnerError: HTTPStatus.FORBIDDEN,
    api_errors.ProviderUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    api_errors.SignInRoleError: HTTPStatus.FORBIDDEN,
    api_errors.SignInTooOftenError: HTTPStatus.TOO_MANY_REQUESTS,
    api_errors.PresetFixedError: HTTPStatus.CONFLICT,
    api_errors.TrainerNotFoundError: HTTPStatus.NOT_FOUND,
    api_errors.AssetNotFoundError: HTTPStatus.NOT_FOUND,
    api_errors.ComparisonInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    api_errors.ColumnUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    api_errors.AnalysisUnavailableError: HTTPStatus.NOT_FOUND,
    db_errors.CampaignNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TrialNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TrialLogNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.WorkerNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.WorkerSupersededError: HTTPStatus.CONFLICT,
    db_errors.PlanNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.PlanLimitError: HTTPStatus.CONFLICT,
    db_errors.CampaignDuplicateError: HTTPStatus.CONFLICT,
    db_errors.CampaignStateError: HTTPStatus.CONFLICT,
    db_errors.IdempotencyKeyReusedError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.IdempotencyKeyInUseError: HTTPStatus.CONFLICT,
    db_errors.DescriptionNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.DescriptionOwnedError: HTTPStatus.FORBIDDEN,
    db_errors.WorkerOwnedError: HTTPStatus.FORBIDDEN,
    db_errors.DescriptionLimitError: HTTPStatus.CONFLICT,
    db_errors.TrialDuplicateError: HTTPStatus.CONFLICT,
    db_errors.TrialStateError: HTTPStatus.CONFLICT,
    db_errors.AttemptNotFoundError: HTTPStatus.CONFLICT,
    db_errors.NodeNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.NodeStateError: HTTPStatus.CONFLICT,
    db_errors.TokenNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TokenDuplicateError: HTTPStatus.CONFLICT,
    db_errors.OwnerInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.OwnerNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.QuotaExceededError: HTTPStatus.CONFLICT,
    db_errors.WebhookInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.WebhookNotFoundError: HTTPStatus.NOT_FOUND,
    db_errors.TokenInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.MeasurementInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.TrialFilterInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.ObjectiveUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.ValueUnstorableError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.ListingInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    db_errors.DatabaseUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    space_errors.DocumentMalformedError: HTTPStatus.BAD_REQUEST,
    space_errors.DocumentInvalidError: HTTPStatus.UNPROCESSABLE_ENTITY,
    space_errors.SearchSpaceError: HTTPStatus.UNPROCESSABLE_ENTITY,
    exporters.ExportFormatUnknownError: HTTPStatus.UNPROCESSABLE_ENTITY,
    exporters.ExportImpossibleError: HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""The status of each error; an error that is not here is a fault of the service."""


def problem_response(
    status: int,
    detail: str,
    *,
    kind: str | None = None,
    errors: list[FieldError] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """A response with a problem document.

    `kind` is the last part of its type, for example "campaign-duplicate"; by default it is the name
    of the status.
    """
    title = HTTPStatus(status).phrase
    problem = Problem(
        type=f"urn:layout-tuner:problem:{kind or re.sub('[^a-z]+', '-', title.lower()).strip('-')}",
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
    """Makes the application answer every error with a problem document."""
    for known in STATUS_OF:
        app.add_exception_handler(known, known_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _fault)


async def names_fields_of_body(request: Request) -> None:
    """A dependency of routes that read a document: fields in refusals are fields of the body."""
    request.state.names_fields_of_body = True


def known_error(request: Request, error: Exception) -> Response:
    """The answer to an error of `STATUS_OF`."""
    status = next(STATUS_OF[base] for base in type(error).__mro__ if base in STATUS_OF)
    # An immediate retry would find the database in the same state.
    wait_s = getattr(error, "wait_s", 1.0 if status == HTTPStatus.SERVICE_UNAVAILABLE else 0.0)
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))} if wait_s else None
    return problem_response(
        status, str(error), kind=_kind(error), errors=_fields_of(request, error), headers=headers
    )


def _fields_of(request: Request, error: Exception) -> list[FieldError] | None:
    if isinstance(error, space_errors.DocumentInvalidError):
        return [FieldError(field=_body_field(error.field), message=_printable(error.problem))]
    is_of_body = getattr(request.state, "names_fields_of_body", False)
    if not (is_of_body and isinstance(error, space_errors.SearchSpaceError)):
        return None
    if len(error.parts) == 1 and not error.field:
        return None  # the error is about the whole document
    return [
        FieldError(field=_body_field(part.field), message=_printable(part.problem))
        for part in error.parts[: space_errors.MAX_PARTS]
    ]


def _body_field(field: str) -> str:
    return _printable(f"body.{field}" if field else "body")


def _kind(error: Exception) -> str:
    if isinstance(error, db_errors.DeviceSignInRefusedError):
        return error.kind
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def too_many(why: str, wait_s: float) -> Response:
    seconds = max(1, math.ceil(wait_s))
    return problem_response(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{why}; try again in {seconds} s",
        headers={"Retry-After": str(seconds)},
    )


def _printable(text: str) -> str:
    """Escapes what is not valid text, such as half of a surrogate pair in a request."""
    return text.encode("utf-8", "backslashreplace").decode()


def _client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this response; without it, a half-sent body would be logged as a fault."""
    return problem_response(
        HTTPStatus.BAD_REQUEST, "the connection was closed before the request body was complete"
    )


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {_printable(request.url.path)}; /docs lists what there is"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible here; /docs lists what is"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework states the methods of one route only; a path may have several.
        methods = request.app.state.routes.methods(route_path(request.scope))
        headers["Allow"] = ", ".join(methods)
    return problem_response(error.status_code, detail, headers=headers or None)


def _invalid_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    fields = [_field_error(entry) for entry in found[:20]]
    detail = "; ".join(f"{entry.field}: {entry.message}" for entry in fields[:3])
    if len(found) > 3:
        detail += f"; and {len(found) - 3} more"
    return problem_response(
        HTTPStatus.UNPROCESSABLE_ENTITY, detail, kind="request-invalid", errors=fields
    )


def _field_error(entry: dict[str, Any]) -> FieldError:
    """An error of pydantic; errors of our own readers add the field inside the document."""
    parts = [str(part)[:80] for part in entry["loc"]]
    message = _MESSAGES.get(entry["type"], entry["msg"]).removeprefix("Value error, ")
    cause = entry.get("ctx", {}).get("error")
    if isinstance(cause, space_errors.SearchSpaceError):
        parts += [cause.field] if cause.field else []
        message = cause.problem
    return FieldError(field=_printable(".".join(parts)), message=_printable(message))


_MESSAGES: Final = {
    "unexpected_keyword_argument": "Extra inputs are not permitted",
    "dataclass_type": "Input should be a valid dictionary or object to extract fields from",
}
"""By pydantic's type of error: for dataclasses, the same message as for models."""


def _fault(_request: Request, _error: Exception) -> Response:
    # The traceback goes to the service's log, not to the client.
    return problem_response(
        HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the service; its log has the details"
    )
