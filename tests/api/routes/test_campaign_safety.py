"""A campaign's file is data and nothing else: ranks receive numbers, choices, and one name.

Only text could run code or name a file or a host. These tests check that documents have only the
few known text fields, and follow hostile text to every place where it is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from fastapi.testclient import TestClient

from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.calibration_file import constants_file
from layout_tuner.search_spaces.jobs.job_choices import JobChoices
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.hostile_texts import changed, walk

HOSTILE = [
    *("../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://203.0.113.9/x"),
    *("$(touch /tmp/owned)", "`touch /tmp/owned`", "'; touch /tmp/owned; '", "-rf", ".."),
    *("{0.__class__.__mro__}", "%s%n", "__import__('os').system('touch /tmp/owned')"),
    *("!!python/object/apply:os.system [touch /tmp/owned]", "\N{SNOWMAN}" * 64),
]
FULL = CampaignSpec.from_mapping({**CAMPAIGN, "start_from": []}).to_mapping()
"""A campaign with every field written out."""

TEXTS_OF_REQUESTS = {
    "model.name",
    "model.lacks",  # a line for people, which pages escape and exports print as a note
    "model.layer_kinds",  # words of one list (`LAYER_KINDS`)
    "trainer",  # looked up among the names that the worker's owner has listed
    "parameters",  # checked by the owner's declarations; no shell reads them
    # Words and digits of a grammar each, in one canonical text (`Knob.parse`).
    *("layout.pipeline_layout", "layout.recompute", "layout.recompute_layers"),
    "layout.job",  # names and words of letters, digits, _, + and -, which begin with a letter
}
TEXTS_OF_CAMPAIGNS = {
    *("name", "model.name", "cluster.name", "cluster.device", "cluster.source", "warnings"),
    "cluster.node_hour_price",  # an amount and a currency (`read_price`)
    "cluster.levels.name",  # a name, which pages escape
    *("model.lacks", "model.layer_kinds"),  # as above
    "cluster.peak_flops_per_s",  # its keys: the precisions
    "start_from",
    "probe.trainer",  # as above
    "probe.parameters",  # as above
    *("baseline.job", "layouts.job"),  # as above
    *("baseline.pipeline_layout", "baseline.recompute", "baseline.recompute_layers"),  # as above
    *("layouts.pipeline_layout", "layouts.recompute", "layouts.recompute_layers"),  # as above
}


def text_fields(kind: Any, path: str) -> Iterator[str]:
    """Fields of a document that take any text, as "model.name"."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (JobSettings, JobChoices):  # read by readers of their own
        yield path
    elif dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield from text_fields(hints[field.name], f"{path}.{field.name}".lstrip("."))
    elif origin is Literal or kind in (int, float, bool, types.NoneType, Any, ...):
        return
    elif kind is str:
        yield path
    elif origin in (Union, types.UnionType) or origin is not None:
        for part in parts:
            yield from text_fields(part, path)
    else:
        raise AssertionError(f"{path}: nobody says what {kind} may hold")


def test_campaigns_and_probe_requests_have_few_text_fields() -> None:
    """A field of text that is added here needs a reason, and a look at where ranks take it."""
    assert set(text_fields(ProbeRequest, "")) == TEXTS_OF_REQUESTS
    # Choices by name are Literals; the space's own reader checks the words of the knobs.
    found = {field for field in text_fields(CampaignSpec, "") if not field.startswith("space.")}
    assert found <= TEXTS_OF_CAMPAIGNS


@pytest.fixture(scope="module")
def api(lasting: TestClient) -> Api:
    return Api(lasting)


def asked_of_workers(api: Api, document: dict[str, Any]) -> dict[str, Any] | None:
    """What a worker of the campaign's cluster would be asked to run; None if it is refused."""
    answer = api.http.post("/v1/campaigns", json=document)
    assert answer.status_code in (201, 422), answer.text
    if answer.status_code == 422:
        return None
    created = answer.json()
    api.store.trials.add(created["id"], Layout(num_microbatches=8))
    request: dict[str, Any] = api.lease(api.register("w", cluster=created["cluster"]))["request"]
    api.post(f"/campaigns/{created['name']}/cancel")
    return request


@pytest.mark.parametrize("every", [len(HOSTILE), pytest.param(3, marks=pytest.mark.slow)])
def test_hostile_text_anywhere_in_a_campaign_is_refused_or_stays_a_name(
    api: Api, every: int
) -> None:
    normal = asked_of_workers(api, {**FULL, "name": f"normal-{every}"})
    assert normal is not None
    planned = [each["predicted"] for each in api.post("/plans", FULL)["layouts"]]
    leaves = (path for path, value in walk(FULL) if not isinstance(value, (dict, list)))
    for number, path in enumerate(leaves):
        for hostile in HOSTILE[number % every :: every]:
            document = changed(FULL, path, hostile)
            if path != ("name",):
                document["name"] = f"c{every}-{number}-{HOSTILE.index(hostile)}"
            asked = asked_of_workers(api, document)
            plan = api.http.post("/v1/plans", json=document)
            assert plan.status_code == (422 if asked is None else 200), (path, hostile, plan.text)
            if asked is None:
                continue
            assert path[-1] in ("name", "device", "source") or path[0] == "warnings", path
            if path == ("model", "name"):
                asked["model"]["name"] = normal["model"]["name"]
            assert asked == normal, (path, hostile)
            # A device that is named a CPU keeps less in memory: its name is looked at, and no more.
            if path != ("cluster", "device"):
                predicted = [each["predicted"] for each in plan.json()["layouts"]]
                assert predicted == planned, (path, hostile)


def test_unknown_fields_of_any_name_are_refused(api: Api) -> None:
    places = ((), ("model",), ("cluster",), ("space",), ("budget",), ("probe",), ("stop",))
    for place, hostile in zip(itertools.cycle(places), HOSTILE):
        document = changed(FULL, (*place, hostile), hostile)
        for route in ("campaigns", "plans"):
            api.post(f"/{route}", document, status=422)


def test_a_clusters_constants_are_read_in_their_folder_whatever_its_name(tmp_path: Path) -> None:
    for hostile in [*HOSTILE, "a/../../b", "\\..\\x", "."]:
        file = constants_file(tmp_path, hostile)
        assert file.parent == tmp_path / "measured"
        assert file.resolve().parent == (tmp_path / "measured").resolve()
