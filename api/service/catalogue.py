"""Models and clusters by name: presets, and those that users have put."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from api.errors import PresetFixedError
from results_db.descriptions import DescriptionKind
from results_db.errors import DescriptionNotFoundError
from results_db.store import Store
from search_spaces.errors import ClusterInvalidError, ModelShapeInvalidError, SearchSpaceError
from search_spaces.measured_constants import with_measured_constants
from search_spaces.presets.clusters import CLUSTER_PRESETS, LOCAL_CPU, resolve_cluster
from search_spaces.presets.models import MODEL_PRESETS, resolve_model
from search_spaces.reading import nearest, shown, url_name_problem

PRESET_NAMES: Final[Mapping[DescriptionKind, Collection[str]]] = {
    "model": tuple(MODEL_PRESETS),
    "cluster": (LOCAL_CPU, *CLUSTER_PRESETS),
}

_ERRORS: Final[Mapping[DescriptionKind, type[SearchSpaceError]]] = {
    "model": ModelShapeInvalidError,
    "cluster": ClusterInvalidError,
}


def with_own(store: Store, document: Any) -> Any:
    """A campaign's document with the users' own models and clusters written out where it names one.

    What is no document, or names a preset, is returned as it is: the reader judges it.

    Raises:
        SearchSpaceError: the document names a model that is neither a preset nor the users' own.
    """
    if not isinstance(document, Mapping):
        return document
    return {
        **document,
        **{
            kind: written_out(store, kind, document[kind])
            for kind in PRESET_NAMES
            if kind in document
        },
    }


def written_out(store: Store, kind: DescriptionKind, described: Any) -> Any:
    """A description in which no name of the users' own stands for one any more.

    As with presets, a model with changes is called "<name>-custom" unless it is named.
    """
    is_mapping = isinstance(described, Mapping)
    named = described.get("preset") if is_mapping else described
    if is_mapping and kind == "cluster" and set(described) == {"name"}:
        named, is_mapping = described["name"], False
    if not isinstance(named, str) or named in PRESET_NAMES[kind]:
        return described
    try:
        own = store.description(kind, named).description
    except DescriptionNotFoundError:
        _refuse_unknown(store, kind, named, is_certain=is_mapping or kind == "model")
        return described
    changes = (
        {key: value for key, value in described.items() if key != "preset"} if is_mapping else {}
    )
    if changes and kind == "model":
        changes.setdefault("name", f"{named}-custom")
    if "device_memory_gb" in changes:
        own = {key: value for key, value in own.items() if key != "device_memory_bytes"}
    return {**own, **changes}


def _refuse_unknown(store: Store, kind: DescriptionKind, name: str, *, is_certain: bool) -> None:
    """Lists the users' own besides the presets; a cluster's plain name may be a new one."""
    own = [record.name for record in store.descriptions(kind)]
    if own and is_certain:
        known = [*PRESET_NAMES[kind], *own]
        raise _ERRORS[kind](f"unknown {kind} {shown(name)}{nearest(name[:80], known)}", field=kind)


def resolved_model(store: Store, name: str, described: Any) -> dict[str, Any]:
    """The shape that is to be kept under a name, with every field.

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
    """The cluster that is to be kept under a name, with every field, and what was guessed of it.

    Constants that were measured on its preset's machine are taken from there.

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
    """Refuses to change what comes with the program.

    Raises:
        PresetFixedError: the name is a preset's.
    """
    if name in PRESET_NAMES[kind]:
        raise PresetFixedError(
            f"{name!r} is a preset, which cannot be replaced or deleted; start another {kind} from "
            f"it: {{preset: {name}, ...}} under a name of your own"
        )


def _refuse_name(kind: DescriptionKind, name: str, described: Any) -> None:
    problem = url_name_problem(name)
    if problem:
        raise _ERRORS[kind](problem, field="name")
    refuse_preset(kind, name)
    inside = described.get("name", name) if isinstance(described, Mapping) else name
    if inside != name:
        raise _ERRORS[kind](
            f"{shown(inside)} is not {name!r}, under which the {kind} is put; leave it out",
            field="name",
        )


def _named(described: Any, name: str) -> Any:
    """The description under its name; of a preset's plain name, one that starts from it."""
    if isinstance(described, str):
        return {"preset": described, "name": name}
    return {**described, "name": name} if isinstance(described, Mapping) else described


def preset_description(kind: DescriptionKind, name: str) -> dict[str, Any]:
    """A preset's fields, with which a campaign file could write it out; this machine's are detected."""
    if kind == "model":
        return MODEL_PRESETS[name].to_mapping()
    return resolve_cluster(name)[0].to_mapping()
