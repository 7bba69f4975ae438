"""Models and clusters by name: presets, and those of users."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Path, Response

from layout_tuner.api.campaigns.named_models_and_clusters import (
    PRESET_NAMES,
    refuse_preset,
    resolved_cluster,
    resolved_model,
)
from layout_tuner.api.dependencies import SettingsDep, StoreDep
from layout_tuner.api.http.error_responses import names_fields_of_body
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import DESCRIPTION_SCHEMA, DocumentDep, body_of
from layout_tuner.api.schemas.campaigns_and_trials import Document
from layout_tuner.api.schemas.model_and_cluster_documents import (
    ClusterPage,
    ClusterRead,
    ModelPage,
    ModelRead,
)
from layout_tuner.results_db.campaigns.models_and_clusters import DescriptionRecord
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.models.model_shape import ModelShape

router = LazyRouter(prefix="/v1", tags=["models and clusters"])

Name = Annotated[
    str,
    Path(
        max_length=64,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="Name of a preset, or of a user's entry.",
    ),
]


def _put_answers(model: type[Document]) -> dict[int | str, dict[str, Any]]:
    description = "It is new; 200 if it replaced an entry of the same name."
    return {HTTPStatus.CREATED: {"description": description, "model": model}}


@router.get("/models")
def list_models(store: StoreDep) -> ModelPage:
    """List the models that campaign files can name."""
    own = [_own_model(record) for record in store.catalogue.find("model")]
    return ModelPage(models=[*ModelPage.of_presets().models, *own])


@router.get("/models/{name}")
def read_model(name: Name, store: StoreDep) -> ModelRead:
    """Read a model: all fields of its shape."""
    if name in PRESET_NAMES["model"]:
        return ModelRead.of_preset(name)
    return _own_model(store.catalogue.get("model", name))


@router.put(
    "/models/{name}",
    openapi_extra=body_of(DESCRIPTION_SCHEMA),
    responses=_put_answers(ModelRead),
    dependencies=[Depends(names_fields_of_body)],
)
def put_model(
    name: Name, description: DocumentDep, store: StoreDep, response: Response
) -> ModelRead:
    """Store a model under a name, as JSON or YAML: a shape, or `{preset: ..., field: ...}`.

    All its fields are stored, and it replaces a user's model of that name. Campaigns that were
    submitted with the old one do not change. 409 if a preset has the name.
    """
    shape = resolved_model(store, name, description)
    record, is_new = store.catalogue.put("model", name, shape)
    response.status_code = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return _own_model(record)


@router.delete("/models/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_model(name: Name, store: StoreDep) -> None:
    """Delete a user's model; campaigns that were submitted with it do not change."""
    refuse_preset("model", name)
    store.catalogue.delete("model", name)


@router.get("/clusters")
def list_clusters(store: StoreDep) -> ClusterPage:
    """List the clusters that campaign files can name."""
    own = [_own_cluster(record) for record in store.catalogue.find("cluster")]
    return ClusterPage(clusters=[*ClusterPage.of_presets().clusters, *own])


@router.get("/clusters/{name}")
def read_cluster(name: Name, store: StoreDep) -> ClusterRead:
    """Read a cluster: its limits and its constants."""
    if name in PRESET_NAMES["cluster"]:
        return ClusterRead.of_preset(name)
    return _own_cluster(store.catalogue.get("cluster", name))


@router.put(
    "/clusters/{name}",
    openapi_extra=body_of(DESCRIPTION_SCHEMA),
    responses=_put_answers(ClusterRead),
    dependencies=[Depends(names_fields_of_body)],
)
def put_cluster(
    name: Name, description: DocumentDep, store: StoreDep, settings: SettingsDep, response: Response
) -> ClusterRead:
    """Store a cluster under a name, as JSON or YAML: its fields, or `{preset: ..., field: ...}`.

    All its fields are stored, with the constants that were measured on this machine for its preset,
    if there are any. It replaces a user's cluster of that name. 409 if a preset has the name.
    """
    cluster, guessed = resolved_cluster(store, name, description, settings.data_dir)
    record, is_new = store.catalogue.put("cluster", name, cluster, notes=guessed)
    response.status_code = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return _own_cluster(record)


@router.delete("/clusters/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_cluster(name: Name, store: StoreDep) -> None:
    """Delete a user's cluster; campaigns that were submitted with it do not change."""
    refuse_preset("cluster", name)
    store.catalogue.delete("cluster", name)


def _own_model(record: DescriptionRecord) -> ModelRead:
    shape = ModelShape.from_mapping(record.description)
    return ModelRead.of(record, preset=False, num_parameters=shape.num_parameters)


def _own_cluster(record: DescriptionRecord) -> ClusterRead:
    num_devices = Cluster.from_mapping(record.description).num_devices
    return ClusterRead.of(
        record, preset=False, num_devices=num_devices, warning=record.notes or None
    )
