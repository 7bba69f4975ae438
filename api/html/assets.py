"""Scripts and styles of the pages, served under names that change with their content."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

import brotli  # type: ignore[import-untyped]
from fastapi import Request, Response

from layout_tuner.api.errors import AssetNotFoundError
from layout_tuner.api.http.lazy_routes import LazyRouter

PLOTLY: Final = "plotly.js"
"""The plot library, from the installed package plotly; pages load it where they show a plot."""

_COMPRESS_FROM_BYTES: Final = 1024
_BROTLI_QUALITY: Final = 5
"""A higher quality takes seconds for the plot library and saves a tenth."""
_MAPLIBRE_STYLE: Final = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')

router = LazyRouter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A file of the dashboard."""

    name: str
    content: bytes
    digest: str
    """Part of its URL, so that browsers may keep it for ever."""

    @property
    def path(self) -> str:
        """Its path below the URL prefix of the service."""
        return f"/assets/{self.digest}/{self.name}"


@cache
def assets() -> Mapping[str, Asset]:
    """All files of the dashboard by their names; each is read at most once in a process."""
    found = {}
    for file in (resources.files("layout_tuner.api.html") / "static").iterdir():
        if file.is_file():
            found[file.name] = _asset(file.name, file.read_bytes())
    # Only the file of plotly is used; importing the package would take a second.
    plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
    found[PLOTLY] = _asset(PLOTLY, plotly.read_bytes())
    return found


@cache
def maplibre_style_id() -> str:
    """The id of the element that plotly looks up before it inserts a style for maps.

    Pages have an empty element with this id: the policy of the pages forbids the style. The id
    changes with the version of plotly.
    """
    found = _MAPLIBRE_STYLE.search(assets()[PLOTLY].content)
    return found[1].decode() if found else ""


def _asset(name: str, content: bytes) -> Asset:
    return Asset(name=name, content=content, digest=hashlib.sha256(content).hexdigest()[:16])


@cache
def _compressed(name: str, encoding: str) -> bytes:
    content = assets()[name].content
    if encoding == "br":
        return bytes(brotli.compress(content, quality=_BROTLI_QUALITY))
    return gzip.compress(content)


@router.get("/assets/{digest}/{name}")
def read_asset(digest: str, name: str, request: Request) -> Response:
    """A script, style or picture of the pages; AssetNotFoundError if there is no such file."""
    asset = assets().get(name)
    if asset is None or asset.digest != digest:
        raise AssetNotFoundError(
            f"this version of the service has no file {name!r}; reload the page"
        )
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "Vary": "Accept-Encoding",
        # A worker has the policy of its script: that of the event stream connects to the service.
        "Content-Security-Policy": "default-src 'none'; connect-src 'self'; frame-ancestors 'none'",
    }
    content = asset.content
    if len(content) >= _COMPRESS_FROM_BYTES:
        accepted = request.headers.get("accept-encoding", "")
        for encoding in ("br", "gzip"):
            if encoding in accepted:
                content = _compressed(name, encoding)
                headers["Content-Encoding"] = encoding
                break
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, media_type=kind, headers=headers)
