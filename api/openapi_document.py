"""The OpenAPI document as it is checked in: `python -m api.openapi_document` prints it.

It is what clients of other makes are written from, and a change of the API shows in it.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

from api.app import create_app
from api.settings import Settings
from results_db.store import Store

CHECKED_IN: Final = Path(__file__).parent.parent / "docs" / "openapi.json"
"""Where it lies in the source tree."""

_NO_DATABASE: Final = "sqlite:////dev/null"
"""Nothing is asked of it: it is not even opened."""


def openapi_text() -> str:
    """The document of this version's routes, as text; the same for the same routes."""
    with closing(Store(_NO_DATABASE)) as store:
        document = create_app(Settings(token=""), store).openapi()
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(openapi_text())
