"""Models and clusters by name: presets, and the users' own."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from api.campaign_documents import DESCRIPTION_SCHEMA, DocumentDep, body_of
from api.campaign_schemas import ClusterPage, ClusterRead, ModelPage, ModelRead
from api.catalogue import (
    PRESET_NAMES,
    preset_description,
    refuse_preset,
    resolved_cluster,
    resolved_model,
)
from api.dependencies import SettingsDep, StoreDep
from api.schemas import Document
from results_db.descriptions import DescriptionRecord
from search_spaces.cluster import Cluster
from search_spaces.model_shape import ModelShape

router = APIRouter(prefix="/v1", tags=["models and clusters"])

Name = Annotated[
    str,
    Path(max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$", description="A preset's, or one's own."),
]


def _put_answers(model: type[Document]) -> dict[int | str, dict[str, Any]]:
    told = "It is new; 200 where it took another one's place."
    return {HTTPStatus.CREATED: {"description": told, "model": model}}


@router.get("/models")
def list_models(store: StoreDep) -> ModelPage:
    """List the models that campaign files can name."""
    presets = [_preset_model(name) for name in PRESET_NAMES["model"]]
    return ModelPage(models=[*presets, *map(_model_read, store.descriptions("model"))])


@router.get("/models/{name}")
def read_model(name: Name, store: StoreDep) -> ModelRead:
    """Read a model: every field of its shape."""
    if name in PRESET_NAMES["model"]:
        return _preset_model(name)
    return _model_read(store.description("model", name))


@router.put(
    "/models/{name}",
    openapi_extra=body_of(DESCRIPTION_SCHEMA),
    responses=_put_answers(ModelRead),
)
def put_model(
    name: Name, description: DocumentDep, store: StoreDep, response: Response
) -> ModelRead:
    """Keep a model under a name, as JSON or YAML: a shape, or `{preset: ..., field: ...}`.

    It is written out in full, and takes the place of one's own model of that name. Campaigns that were
    submitted with that one stay as they are. 409 where the name is a preset's.
    """
    shape = resolved_model(store, name, description)
    record, is_new = store.put_description("model", name, shape)
    response.status_code = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return _model_read(record)


@router.delete("/models/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_model(name: Name, store: StoreDep) -> None:
    """Delete one's own model; campaigns that were submitted with it stay as they are."""
    refuse_preset("model", name)
    store.delete_description("model", name)


@router.get("/clusters")
def list_clusters(store: StoreDep) -> ClusterPage:
    """List the clusters that campaign files can name."""
    presets = [_preset_cluster(name) for name in PRESET_NAMES["cluster"]]
    return ClusterPage(clusters=[*presets, *map(_cluster_read, store.descriptions("cluster"))])


@router.get("/clusters/{name}")
def read_cluster(name: Name, store: StoreDep) -> ClusterRead:
    """Read a cluster: its limits and its constants."""
    if name in PRESET_NAMES["cluster"]:
        return _preset_cluster(name)
    return _cluster_read(store.description("cluster", name))


@router.put(
    "/clusters/{name}",
    openapi_extra=body_of(DESCRIPTION_SCHEMA),
    responses=_put_answers(ClusterRead),
)
def put_cluster(
    name: Name,
    description: DocumentDep,
    store: StoreDep,
    settings: SettingsDep,
    response: Response,
) -> ClusterRead:
    """Keep a cluster under a name, as JSON or YAML: its fields, or `{preset: ..., field: ...}`.

    It is written out in full, with constants that were measured on this machine where its preset has
    any, and takes the place of one's own cluster of that name. 409 where the name is a preset's.
    """
    cluster, guessed = resolved_cluster(store, name, description, settings.data_dir)
    record, is_new = store.put_description("cluster", name, cluster, notes=guessed)
    response.status_code = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return _cluster_read(record)


@router.delete("/clusters/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_cluster(name: Name, store: StoreDep) -> None:
    """Delete one's own cluster; campaigns that were submitted with it stay as they are."""
    refuse_preset("cluster", name)
    store.delete_description("cluster", name)


def _preset_model(name: str) -> ModelRead:
    description = preset_description("model", name)
    return ModelRead(**_preset(name, description), **_counted_model(description))


def _model_read(record: DescriptionRecord) -> ModelRead:
    return ModelRead(**_own(record), **_counted_model(record.description))


def _preset_cluster(name: str) -> ClusterRead:
    description = preset_description("cluster", name)
    counted = _counted_cluster(description)
    return ClusterRead(**_preset(name, description), **counted, warning=None)


def _cluster_read(record: DescriptionRecord) -> ClusterRead:
    counted = _counted_cluster(record.description)
    return ClusterRead(**_own(record), **counted, warning=record.notes or None)


def _counted_model(description: Any) -> dict[str, Any]:
    return {"num_parameters": ModelShape.from_mapping(description).num_parameters}


def _counted_cluster(description: Any) -> dict[str, Any]:
    return {"num_devices": Cluster.from_mapping(description).num_devices}


def _preset(name: str, description: dict[str, Any]) -> dict[str, Any]:
    nobody = {"created_by": None, "created_at": None, "updated_at": None}
    return {"name": name, "preset": True, "description": description, **nobody}


def _own(record: DescriptionRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "preset": False,
        "description": dict(record.description),
        "created_by": record.created_by,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
    }
