"""The OpenAPI document: `python -m layout_tuner.api.openapi_document` prints it.

It is checked in, for authors of other clients and to make changes of the API visible.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

from layout_tuner.api.app import create_app
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store

CHECKED_IN: Final = Path(__file__).parent.parent / "docs" / "openapi.json"
"""The document in the source tree."""

_NO_DATABASE: Final = "sqlite:////dev/null"
"""A database that is never opened."""


def openapi_text() -> str:
    """The document as text. The same routes give the same text."""
    with closing(Store(_NO_DATABASE)) as store:
        document = create_app(Settings(token=""), store).openapi()
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(openapi_text())
