"""Models and clusters by name: presets, and those that users have stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from layout_tuner.api.errors import PresetFixedError
from layout_tuner.documents.reading import Problems, nearest, shown, url_name_problem
from layout_tuner.errors import ClusterInvalidError, ModelShapeInvalidError, SearchSpaceError
from layout_tuner.results_db.campaigns.models_and_clusters import DescriptionKind
from layout_tuner.results_db.errors import DescriptionNotFoundError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.clusters.calibration_file import with_measured_constants
from layout_tuner.search_spaces.clusters.cluster_presets import (
    CLUSTER_PRESETS,
    LOCAL_CPU,
    resolve_cluster,
    unknown_cluster,
)
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS, resolve_model

PRESET_NAMES: Final[Mapping[DescriptionKind, Collection[str]]] = {
    "model": tuple(MODEL_PRESETS),
    "cluster": (LOCAL_CPU, *CLUSTER_PRESETS),
}

_ERRORS: Final[Mapping[DescriptionKind, type[SearchSpaceError]]] = {
    "model": ModelShapeInvalidError,
    "cluster": ClusterInvalidError,
}


def with_own(store: Store, document: Any, problems: Problems) -> Any:
    """A campaign's document, with the users' models and clusters in place of their names.

    A value that is not a mapping, or that names a preset, is returned unchanged: the reader of
    campaigns checks it. A preset takes the place of one that has problems, so that the rest of the
    document can be checked.
    """
    if not isinstance(document, Mapping):
        return document
    written = dict(document)
    for kind, presets in PRESET_NAMES.items():
        if kind in document:
            written[kind] = next(iter(presets))
            with problems.collecting():
                written[kind] = written_out(store, kind, document[kind])
    return written


def written_out(store: Store, kind: DescriptionKind, described: Any) -> Any:
    """A description in which the name of a user's model or cluster is replaced by its fields.

    As with presets, a model with changes is called "<name>-custom" unless it has a name.
    """
    is_mapping = isinstance(described, Mapping)
    named = described.get("preset") if is_mapping else described
    is_new = is_mapping and kind == "cluster" and set(described) == {"name"}
    if is_new:
        named, is_mapping = described["name"], False
    if not isinstance(named, str) or named in PRESET_NAMES[kind]:
        return described
    try:
        own = store.catalogue.get(kind, named).description
    except DescriptionNotFoundError:
        if not is_new:
            _refuse_unknown(store, kind, named)
        return described
    changes = (
        {key: value for key, value in described.items() if key != "preset"} if is_mapping else {}
    )
    if changes and kind == "model":
        changes.setdefault("name", f"{named}-custom")
    if "device_memory_gb" in changes:
        own = {key: value for key, value in own.items() if key != "device_memory_bytes"}
    return {**own, **changes}


def _refuse_unknown(store: Store, kind: DescriptionKind, name: str) -> NoReturn:
    """The error lists the names of presets and of users' models or clusters."""
    own = [record.name for record in store.catalogue.find(kind)]
    if kind == "cluster":
        raise unknown_cluster(name, own=own).within(kind)
    known = [*PRESET_NAMES[kind], *own]
    raise ModelShapeInvalidError(f"unknown model {shown(name)}{nearest(name, known)}", field=kind)


def resolved_model(store: Store, name: str, described: Any) -> dict[str, Any]:
    """The shape to store under a name, with every field.

    Raises:
        SearchSpaceError: the name or the shape is impossible.
        PresetFixedError: the name is a preset's.
    """
    _refuse_name("model", name, described)
    named = _named(written_out(store, "model", described), name)
    return resolve_model(named).to_mapping()


def resolved_cluster(
    store: Store, name: str, described: Any, data_dir: Path | None
) -> tuple[dict[str, Any], str]:
    """The cluster to store under a name, with every field, and a warning about its constants.

    Constants that were measured on this machine replace those of its preset.

    Raises:
        SearchSpaceError: the name or the description is impossible.
        PresetFixedError: the name is a preset's.
    """
    _refuse_name("cluster", name, described)
    named = _named(written_out(store, "cluster", described), name)
    if data_dir is not None:
        named = with_measured_constants(named, data_dir)
    cluster, warning = resolve_cluster(named)
    return cluster.to_mapping(), warning or ""


def refuse_preset(kind: DescriptionKind, name: str) -> None:
    """Refuses to change a preset. Raises PresetFixedError if the name is a preset's."""
    if name in PRESET_NAMES[kind]:
        raise PresetFixedError(
            f"{name!r} is a preset, which cannot be replaced or deleted; start another {kind} from "
            f"it: {{preset: {name}, ...}} under a name of your own"
        )


def _refuse_name(kind: DescriptionKind, name: str, described: Any) -> None:
    if problem := url_name_problem(name):
        # The problem is in the URL, not in a field of the body.
        raise _ERRORS[kind](problem, shown_field="name")
    refuse_preset(kind, name)
    inside = described.get("name", name) if isinstance(described, Mapping) else name
    if inside != name:
        raise _ERRORS[kind](
            f"{shown(inside)} is not {name!r}, under which the {kind} is put; leave it out",
            field="name",
        )


def _named(described: Any, name: str) -> Any:
    """The description with its name; the plain name of a preset becomes a mapping."""
    if isinstance(described, str):
        return {"preset": described, "name": name}
    return {**described, "name": name} if isinstance(described, Mapping) else described


def preset_description(kind: DescriptionKind, name: str) -> dict[str, Any]:
    """A preset's fields as a campaign file has them; those of local-cpu are detected."""
    if kind == "model":
        return MODEL_PRESETS[name].to_mapping()
    return resolve_cluster(name)[0].to_mapping()
