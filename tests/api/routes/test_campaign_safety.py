"""A campaign's file is data and nothing else: ranks receive numbers, choices, and one name.

Only text could run code or name a file or a host. These tests check that documents have only the
few known text fields, and follow hostile text to every place where it is used.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from fastapi.testclient import TestClient

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.calibration_file import constants_file
from tests.kit.api import CAMPAIGN, CLUSTER, Api

HOSTILE = [
    *("../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://203.0.113.9/x"),
    *("$(touch /tmp/owned)", "`touch /tmp/owned`", "'; touch /tmp/owned; '", "-rf", ".."),
    *("{0.__class__.__mro__}", "%s%n", "__import__('os').system('touch /tmp/owned')"),
    *("!!python/object/apply:os.system [touch /tmp/owned]", "\N{SNOWMAN}" * 64),
]


def text_fields(kind: Any, path: str) -> Iterator[str]:
    """Fields of a document that take any text, as "model.name"."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
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


def test_a_probe_request_has_few_text_fields() -> None:
    """A field of text that is added here needs a reason, and a look at where ranks take it."""
    assert set(text_fields(ProbeRequest, "")) == {
        "model.name",
        "model.lacks",  # a line for people, which pages escape and exports print as a note
        "trainer",  # looked up among the names that the worker's owner has listed
        "parameters",  # checked by the owner's declarations; no shell reads them
    }


def test_a_campaign_has_few_text_fields() -> None:
    # Choices by name are Literals; the space's own reader checks the words of the knobs.
    found = {field for field in text_fields(CampaignSpec, "") if not field.startswith("space.")}
    assert found <= {
        "name",
        "model.name",
        "model.lacks",  # a line for people, which pages escape and exports print as a note
        "cluster.name",
        "cluster.device",
        "cluster.source",
        "cluster.peak_flops_per_s",  # its keys: the precisions
        "start_from",
        "warnings",
        "probe.trainer",  # looked up among the names that the worker's owner has listed
        "probe.parameters",  # checked by the owner's declarations; no shell reads them
    }


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document holds a value or a name."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from leaves(value, (*path, key))
    elif isinstance(document, list):
        for place, value in enumerate(document):
            yield from leaves(value, (*path, place))
    else:
        yield path


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = dict(document) if isinstance(document, Mapping) else list(document)
    changed[path[0]] = with_value(changed[path[0]], path[1:], value)
    return changed


def full_document() -> dict[str, Any]:
    """A campaign with every field written out."""
    return CampaignSpec.from_mapping({**CAMPAIGN, "start_from": []}).to_mapping()


@pytest.fixture
def asked_of_workers(api: Api) -> Any:
    """What a worker of the campaign's cluster would be asked to run."""

    def ask(document: dict[str, Any]) -> dict[str, Any] | None:
        answer = api.http.post("/v1/campaigns", json=document)
        assert answer.status_code in (201, 422), answer.text
        if answer.status_code == 422:
            return None
        created = answer.json()
        store: Store = api.store
        store.trials.add(created["id"], Layout(num_microbatches=8))
        worker = api.register("w", cluster=created["cluster"])
        request: dict[str, Any] = api.lease(worker)["request"]
        api.post(f"/campaigns/{created['name']}/cancel")
        return request

    return ask


def test_hostile_text_anywhere_is_refused_or_stays_a_name(asked_of_workers: Any) -> None:
    document = full_document()
    normal = asked_of_workers(document)
    assert normal is not None
    for number, path in enumerate(leaves(document)):
        for hostile in HOSTILE[number % 3 :: 3]:
            changed = with_value(document, path, hostile)
            if path != ("name",):
                changed["name"] = f"c{number}-{HOSTILE.index(hostile)}"
            asked = asked_of_workers(changed)
            if asked is None:
                continue
            assert path[-1] in ("name", "device", "source") or path[0] == "warnings", path
            if path == ("model", "name"):
                asked["model"]["name"] = normal["model"]["name"]
            assert asked == normal, (path, hostile)


def test_hostile_text_in_a_planned_campaign_is_refused_or_stays_a_name(api: Api) -> None:
    document = full_document()
    normal = api.post("/plans", document)
    for number, path in enumerate(leaves(document)):
        hostile = HOSTILE[number % len(HOSTILE)]
        answer = api.http.post("/v1/plans", json=with_value(document, path, hostile))
        assert answer.status_code in (200, 422), (path, answer.text)
        # A device that is named a CPU keeps less in memory: its name is looked at, and no more.
        if answer.status_code == 200 and path != ("cluster", "device"):
            figures = [each["predicted"] for each in answer.json()["layouts"]]
            assert figures == [each["predicted"] for each in normal["layouts"]], path


@pytest.mark.parametrize("hostile", HOSTILE)
def test_unknown_fields_are_refused(api: Api, hostile: str) -> None:
    for place in ((), ("model",), ("cluster",), ("space",), ("budget",), ("probe",), ("stop",)):
        document = full_document()
        holder: Any = document
        for step in place:
            holder = holder[step]
        holder[hostile] = hostile
        for route in ("campaigns", "plans"):
            assert api.http.post(f"/v1/{route}", json=document).status_code == 422


def test_a_clusters_constants_are_read_in_their_folder_whatever_its_name(tmp_path: Path) -> None:
    for hostile in [*HOSTILE, "a/../../b", "\\..\\x", "."]:
        file = constants_file(tmp_path, hostile)
        assert file.parent == tmp_path / "measured"
        assert file.resolve().parent == (tmp_path / "measured").resolve()


def test_a_cluster_name_that_is_no_file_name_has_no_measured_constants(
    tmp_path: Path, http: TestClient, api: Api
) -> None:
    http.app.state.settings = dataclasses.replace(  # type: ignore[attr-defined]
        http.app.state.settings,  # type: ignore[attr-defined]
        data_dir=tmp_path,
    )
    (tmp_path / "measured").mkdir()
    name = "\N{SLICE OF PIZZA}" * 64  # 256 bytes, and five more
    cluster = {**CLUSTER, "name": name}
    for described in (cluster, {"name": name}, {**cluster, "source": "x"}):
        answer = api.http.post("/v1/campaigns", json={**CAMPAIGN, "cluster": described})
        assert str(tmp_path) not in answer.text
        assert answer.status_code in (201, 409, 422)
