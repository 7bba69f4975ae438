"""A campaign's document as the body of a request: JSON or YAML, and how the API's description shows it."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Depends, Request

from api.dependencies import SettingsDep
from api.documents import JSON_TYPE, YAML_TYPES, reader_of
from api.errors import DocumentTooLargeError, DocumentTypeUnsupportedError

_FIELDS: Final[dict[str, Any]] = {
    "name": {"type": "string", "pattern": r"^(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"},
    "model": {"description": "A name of a preset or of one's own, or a model's shape."},
    "cluster": {"description": "A name of a preset or of one's own, or a cluster's description."},
    "space": {"description": "A preset's name, or values for each knob."},
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
    """The body as it came."""
    body = await request.body()
    if len(body) > settings.max_document_bytes:
        raise DocumentTooLargeError(
            f"the document is {len(body)} bytes long; the most is {settings.max_document_bytes}"
        )
    return body


def read_document(request: Request, body: Annotated[bytes, Depends(document_body)]) -> Any:
    """The body, JSON or YAML as its content type says.

    Not a coroutine: FastAPI runs it beside the event loop, which a long document would hold up.
    """
    content_type = request.headers.get("content-type", "")
    read = reader_of(content_type)
    if read is None:
        raise DocumentTypeUnsupportedError(
            f"content type {content_type[:80]!r} is not one of {JSON_TYPE}, {', '.join(YAML_TYPES)}"
        )
    return read(body)


def read_changes(request: Request, body: Annotated[bytes, Depends(document_body)]) -> Any:
    """The body; no body is no changes."""
    return read_document(request, body) if body.strip() else {}


DocumentDep = Annotated[Any, Depends(read_document)]
ChangesDep = Annotated[Any, Depends(read_changes)]
