"""Bodies of requests: the JSON parser of all routes, forms, and documents.

Documents are those of campaigns, models and clusters, in JSON or YAML.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.errors import DocumentTypeUnsupportedError
from layout_tuner.api.http.body_limits import holder_of, limits_of
from layout_tuner.api.http.lazy_routes import Handler, LazyRoute
from layout_tuner.documents.json_and_yaml import (
    JSON_TYPE,
    YAML_TYPES,
    media_type_of,
    read_json,
    reader_of,
)
from layout_tuner.documents.limits import text_problem

READ_IN_LOOP_BYTES: Final = 16 << 10
"""Longer bodies are parsed and validated in a thread, in turn by token. Of shorter ones the event
loop reads some in the time that a thread takes to start."""

BODIES_AT_ONCE: Final = 2
"""Long bodies that are parsed at the same time."""


class BodyRoute(LazyRoute):
    """Parses the body before FastAPI does, with the same parser for every route.

    A document that is nested too deeply, or has a number that is too large or text that cannot be
    stored, is refused with the path of the field. FastAPI's own parsing keeps the error of a
    malformed body in a variable of a frame in the error's traceback. That cycle holds the body
    until a full garbage collection, which Python starts by the number of objects, not by their
    size.
    """

    def get_route_handler(self) -> Handler:
        handle, field = super().get_route_handler(), self.body_field
        if not {"POST", "PUT", "PATCH"}.intersection(self.methods or ()):
            return handle

        async def parse_and_handle(request: Request) -> Response:
            parsed = _ParsedRequest(request.scope, request.receive)
            if len(await parsed.body()) <= READ_IN_LOOP_BYTES:
                if field is not None:
                    parsed.parse(self.name)
            elif "form" in parsed.headers.get("content-type", ""):
                async with request.app.state.readers.turn(holder_of(request.scope)):
                    await run_in_threadpool(asyncio.run, parsed.read_form())
            elif field is not None:
                async with request.app.state.readers.turn(holder_of(request.scope)):
                    await run_in_threadpool(parsed.parse, self.name, field.validate)
            return await handle(parsed)

        return parse_and_handle


class _ParsedRequest(Request):
    """A request whose JSON body or form is parsed once."""

    _document: Any = None

    def parse(self, operation: str, validate: Callable[..., Any] | None = None) -> None:
        """Parses the body if FastAPI reads it with `Request.json`, and validates it.

        Raises:
            DocumentMalformedError: it is not JSON, or the service does not accept it.
            RequestValidationError: a field is wrong.
        """
        kind, _, subtype = media_type_of(self.headers.get("content-type", "")).partition("/")
        is_json = kind == "application" and (subtype == "json" or subtype.endswith("+json"))
        if not self._body or not is_json:
            return
        most = limits_of(operation).num_values
        self._document = read_json(self._body, most, text_rule=text_problem)
        if validate is not None:
            # FastAPI accepts a valid object as it is, and does not validate it again.
            self._document, errors = validate(self._document, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors)

    async def read_form(self) -> None:
        """Parses the body as a form, which pages and FastAPI find already parsed."""
        await self.form()

    async def json(self) -> Any:
        return self._document


_FIELDS: Final[dict[str, Any]] = {
    "name": {"type": "string", "pattern": r"^(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"},
    "model": {"description": "A name of a preset or of one's own, or a model's shape."},
    "cluster": {"description": "A name of a preset or of one's own, or a cluster's description."},
    "space": {
        "description": "A preset's name, or values for each knob. A knob that is left out, or is `auto`, "
        "gets every sensible value for the model and the cluster; `global_batch_size` is required."
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


async def read_document(request: Request) -> Any:
    """The parsed body: JSON or YAML, by its content type.

    A thread parses it, because a long document would block the event loop.
    """
    content_type = request.headers.get("content-type", "")
    read = reader_of(content_type)
    if read is None:
        raise DocumentTypeUnsupportedError(
            f"content type {content_type[:80]!r} is not one of {JSON_TYPE}, {', '.join(YAML_TYPES)}"
        )
    return await run_in_threadpool(read, await request.body())


async def read_changes(request: Request) -> Any:
    """The parsed body; an empty body is no changes."""
    return await read_document(request) if (await request.body()).strip() else {}


DocumentDep = Annotated[Any, Depends(read_document)]
ChangesDep = Annotated[Any, Depends(read_changes)]
