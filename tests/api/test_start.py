"""What the start of `serve` leaves for later: packages that few need, and routes to analyse."""

from __future__ import annotations

import json
import subprocess
import sys

LATER = {
    *("alembic", "cryptography", "httpx", "joserfc", "plotly", "ray", "rich", "scipy", "torch"),
    "layout_tuner.trainers.found_jobs.known_models",
    "layout_tuner.trainers.found_jobs.read_job",
}


def printed_by(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return list(json.loads(done.stdout))


def test_serve_imports_nothing_that_few_requests_need() -> None:
    code = "import json, sys, layout_tuner.cli.processes.serve; print(json.dumps([*sys.modules]))"
    assert not LATER & set(printed_by(code))


def test_no_route_is_analysed_at_the_start() -> None:
    code = """
import json
from layout_tuner.api.app import create_app
from layout_tuner.api.http.lazy_routes import LazyRoute
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
routes = create_app(Settings(token="t"), Store("sqlite:////never/opened")).routes
lazy = [each for each in routes if isinstance(each, LazyRoute)]
assert len(lazy) > 100
print(json.dumps([each.name for each in lazy if "dependant" in vars(each)]))
"""
    assert printed_by(code) == []
