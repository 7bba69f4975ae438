"""Bodies of requests: their size limit, the JSON parser of all routes, and documents.

Documents are those of campaigns, models and clusters, in JSON or YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.dependencies import SettingsDep
from api.errors import DocumentTooLargeError, DocumentTypeUnsupportedError
from api.http.documents import (
    JSON_TYPE,
    YAML_TYPES,
    media_type_of,
    read_json_request,
    reader_of,
)
from api.http.problems import problem_response


class BodyLimit:
    """Middleware that counts the bytes of a body and answers 413 when there are too many."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # FastAPI re-raises this exception when it reads the body, unlike others.
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._problem)
            return message

        if _declared_length(scope) > self._max_bytes:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            refusal = problem_response(status, self._problem, headers={"Connection": "close"})
            await refusal(scope, receive, send)
            return
        await self._app(scope, counted, send)

    @property
    def _problem(self) -> str:
        return f"the request body is larger than {self._max_bytes} bytes"


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])  # Python refuses to convert thousands of digits
    return 0


_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """Parses the body before FastAPI does, with the same parser for every route.

    A document that is nested too deeply, or has a number that is too large or text that cannot be
    stored, is refused with the path of the field. FastAPI's own parsing keeps the error of a
    malformed body in a variable of a frame in the error's traceback. That cycle holds the body
    until a full garbage collection, which Python starts by the number of objects, not by their
    size.
    """

    def get_route_handler(self) -> _Handler:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def parse_and_handle(request: Request) -> Response:
            parsed = _ParsedRequest(request.scope, request.receive)
            await parsed.parse()
            return await handle(parsed)

        return parse_and_handle


class _ParsedRequest(Request):
    """A request whose JSON body is parsed once, by `read_json_request`."""

    _document: Any = None

    async def parse(self) -> None:
        """Parses the body if its content type is JSON.

        Raises:
            DocumentMalformedError: it is not JSON, or the service does not accept it.
        """
        body = await self.body()
        if body and _is_json(self.headers.get("content-type", "")):
            self._document = read_json_request(body)

    async def json(self) -> Any:
        return self._document


def _is_json(content_type: str) -> bool:
    """Whether FastAPI reads the body with `Request.json`."""
    essence = media_type_of(content_type)
    return essence == JSON_TYPE or (
        essence.startswith("application/") and essence.endswith("+json")
    )


_FIELDS: Final[dict[str, Any]] = {
    "name": {"type": "string", "pattern": r"^(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"},
    "model": {"description": "A name of a preset or of one's own, or a model's shape."},
    "cluster": {"description": "A name of a preset or of one's own, or a cluster's description."},
    "space": {
        "description": "A preset's name, or values for each knob. Without `precision` it is bf16 where "
        "the cluster states a peak for it, else fp16, else fp32 (on CPU cores fp32 first)."
    },
    "objective": {
        "description": "What ranks; or a list, of which the first ranks and all make the front.",
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        ],
    },
    "constraints": {"type": "object"},
    "strategy": {"type": "string"},
    "seed": {"type": "integer"},
    "budget": {"type": "object"},
    "probe": {"type": "object"},
    "stop": {"type": "object"},
    "knowledge": {"type": "string", "enum": ["auto", "none"]},
    "start_from": {"type": "array", "items": {"type": "string"}},
    "baseline": {
        "description": "The layout that its users run today, as values of knobs. A missing knob has "
        "the space's value where that is a single one, and its default otherwise.",
        "type": ["object", "null"],
    },
}

CAMPAIGN_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["name", "model", "cluster", "space"],
    "properties": _FIELDS,
    "example": {
        "name": "tiny",
        "model": "tiny",
        "cluster": "local-cpu",
        "objective": "tokens_per_s",
        "strategy": "random",
        "budget": {"trials": 10},
        "space": {"global_batch_size": 16, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2]},
    },
}

CHANGES_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": _FIELDS,
    "example": {"name": "tiny-longer", "budget": {"trials": 60}},
}

DESCRIPTION_SCHEMA: Final[dict[str, Any]] = {
    "description": "A name, {preset: name, field: value, ...}, or every field.",
    "anyOf": [{"type": "string"}, {"type": "object"}],
    "example": {"preset": "tiny", "num_layers": 8},
}


def body_of(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is a document in JSON or YAML."""
    types = (JSON_TYPE, YAML_TYPES[0])
    content = {media_type: {"schema": schema} for media_type in types}
    return {"requestBody": {"required": required, "content": content}}


async def document_body(request: Request, settings: SettingsDep) -> bytes:
    """The unparsed body, within the limit for documents."""
    body = await request.body()
    if len(body) > settings.max_document_bytes:
        raise DocumentTooLargeError(
            f"the document is {len(body)} bytes long; the most is {settings.max_document_bytes}"
        )
    return body


async def read_document(request: Request, body: Annotated[bytes, Depends(document_body)]) -> Any:
    """The parsed body: JSON or YAML, by its content type.

    A thread parses it, because a long document would block the event loop. Few are parsed at once:
    256 KiB of YAML take 40 MB meanwhile.
    """
    content_type = request.headers.get("content-type", "")
    read = reader_of(content_type)
    if read is None:
        raise DocumentTypeUnsupportedError(
            f"content type {content_type[:80]!r} is not one of {JSON_TYPE}, {', '.join(YAML_TYPES)}"
        )
    async with request.app.state.document_readers:
        return await run_in_threadpool(read, body)


async def read_changes(request: Request, body: Annotated[bytes, Depends(document_body)]) -> Any:
    """The parsed body; an empty body is no changes."""
    return await read_document(request, body) if body.strip() else {}


DocumentDep = Annotated[Any, Depends(read_document)]
ChangesDep = Annotated[Any, Depends(read_changes)]
