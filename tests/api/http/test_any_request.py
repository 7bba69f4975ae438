"""Requests in and outside of the OpenAPI document: no server error, each answer as described."""

from __future__ import annotations

import json
import warnings
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings

from layout_tuner.api.openapi_document import openapi_text
from layout_tuner.results_db.actor import TOKEN_ROLES
from tests.kit.populated import Populated

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Of a strategy that hypothesis names where a filter has it draw again.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


def _config(mode: schemathesis.GenerationMode) -> schemathesis.Config:
    return schemathesis.Config.from_dict(
        {
            "generation": {"mode": mode.value, "allow-x00": True, "allow-extra-parameters": False},
            "max-stream-events": 3,
        }
    )


CONFORMS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
valid: Final = schemathesis.openapi.from_dict(
    json.loads(openapi_text()), config=_config(schemathesis.GenerationMode.POSITIVE)
)
invalid: Final = schemathesis.openapi.from_dict(
    json.loads(openapi_text()), config=_config(schemathesis.GenerationMode.NEGATIVE)
)
# Derandomized, the requests still depend on what is imported beside this module: hypothesis draws
# the constants of all modules of the project that it finds.
asking: Final = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@invalid.hook
def filter_query(_context: schemathesis.HookContext, query: dict[str, Any] | None) -> bool:
    """A parameter that is there twice counts as its last, for us as for most.

    Lists are sent so, and mappings by their keys.
    """
    return not any(isinstance(value, list | dict) for value in (query or {}).values())


def _aim(case: schemathesis.Case, shared: Populated) -> None:
    """Has most requests be of something that there is."""
    for name, known in shared.names.items():
        if name in case.path_parameters:
            drawn = str(case.path_parameters[name])
            if len(drawn) % 4:
                case.path_parameters[name] = known[len(drawn) % len(known)]
    if isinstance(case.body, dict) and "wait_s" in case.body:
        case.body["wait_s"] = 0


def _no_description(case: schemathesis.Case) -> list[Any]:
    """A stream is described as the text that it is, not as its events."""
    return [response_schema_conformance] if "/events" in case.path else []


# What other roles may ask is tested at the gate, route by route.
@pytest.mark.parametrize(
    "role",
    [
        pytest.param(each, marks=[] if each == "admin" else pytest.mark.nightly)
        for each in TOKEN_ROLES
    ],
)
@valid.parametrize()
@asking
def test_valid_requests_of_every_role_are_answered_as_described(
    case: schemathesis.Case, role: str, shared: Populated
) -> None:
    _aim(case, shared)
    case.call_and_validate(
        base_url=shared.url,
        headers=shared.headers(role),
        checks=CONFORMS,
        excluded_checks=_no_description(case),
        timeout=60,
    )


@invalid.parametrize()
@asking
def test_invalid_requests_are_refused_as_described(
    case: schemathesis.Case, shared: Populated
) -> None:
    case.call_and_validate(
        base_url=shared.url,
        headers=shared.headers("admin"),
        checks=[*CONFORMS, negative_data_rejection, unsupported_method],
        excluded_checks=_no_description(case),
        timeout=60,
    )
