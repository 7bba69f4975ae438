"""The interactive OpenAPI page. Its files are installed with the service, so it works offline."""

from __future__ import annotations

from importlib import resources
from typing import Final

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

ASSETS_PATH: Final = "/docs/assets"

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:"
)
"""The browser refuses everything from other hosts."""


def install(app: FastAPI) -> None:
    """Serves the page at /docs."""
    # Only the files of Swagger UI are used, not the package's code.
    assets = resources.files("fastapi_swagger") / "resources"
    app.mount(ASSETS_PATH, StaticFiles(directory=str(assets)), name="docs-assets")
    # FastAPI keeps every function that it has analysed: a closure here would keep the application.
    app.get("/docs", include_in_schema=False)(read_docs)


def read_docs(request: Request) -> HTMLResponse:
    """The interactive page of the API."""
    app: FastAPI = request.app
    prefix = request.scope.get("root_path", "")
    assets = prefix + ASSETS_PATH
    page = get_swagger_ui_html(
        openapi_url=f"{prefix}{app.openapi_url}",
        title=f"{app.title}: the API",
        swagger_js_url=f"{assets}/swagger-ui-bundle.js",
        swagger_css_url=f"{assets}/swagger-ui.css",
        swagger_favicon_url=f"{assets}/favicon-32x32.png",
        swagger_ui_parameters={"persistAuthorization": True, "validatorUrl": None},
    )
    page.headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return page
