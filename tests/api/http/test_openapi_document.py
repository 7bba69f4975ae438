from __future__ import annotations

import json
import subprocess
import sys

import pytest

from api.openapi_document import CHECKED_IN, openapi_text
from api.security.roles import ACCESS


@pytest.mark.slow
def test_the_document_is_the_same_however_python_hashes() -> None:
    def printed(seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "api.openapi_document"],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            cwd=CHECKED_IN.parent.parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert printed("1") == printed("2")


def test_every_route_is_described_and_has_a_rule_of_access() -> None:
    document = json.loads(openapi_text())
    operations = [
        operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in ("get", "put", "post", "patch", "delete")
    ]
    assert len(operations) > 40
    for operation in operations:
        assert operation["operationId"] in ACCESS
        assert operation["summary"], operation["operationId"]
        assert operation["description"], f"{operation['operationId']} has no docstring"
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))


def test_no_description_speaks_of_exceptions_of_python() -> None:
    assert "Raises:" not in openapi_text()
