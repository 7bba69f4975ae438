"""Measured constants of a machine, as `layout-tuner calibrate` stores them.

The data directory has one file for each cluster. Its constants replace those of a preset or of the
detection. Constants that a campaign's own file states take precedence.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from layout_tuner.documents.limits import document_problem, visible_text_problem
from layout_tuner.documents.reading import (
    is_line,
    is_name,
    read_mapping,
    refuse_unknown,
    shown,
    why_unreadable,
)
from layout_tuner.errors import MeasuredConstantsInvalidError, SearchSpaceError
from layout_tuner.search_spaces.clusters.cluster import MEASURED_SOURCE, Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import is_cluster_preset

MEASURED_FIELDS: Final = (
    "peak_flops_per_s",
    "memory_bandwidth_bytes_per_s",
    "intra_node_bandwidth_bytes_per_s",
    "intra_node_latency_s",
    "host_operation_s",
)
"""Fields of a cluster that can be measured on one node."""

FORMAT: Final = "layout-tuner/measured-constants"
VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredConstants:
    """The result of a calibration; MeasuredConstantsInvalidError if a constant is impossible."""

    cluster: str
    host: str
    measured_at: str
    """Time of the measurement, in UTC."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python, torch and this project."""
    num_devices: int = 1
    """Devices that were measured at once."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Cluster` by name."""
    fits: tuple[Mapping[str, Any], ...] = ()
    """Latency and bandwidth of each operation and number of ranks, and how well they fit."""
    timings: tuple[Mapping[str, Any], ...] = ()
    """Every timing that the constants come from."""
    noise: float = 0.0
    """Median relative spread (quartile to quartile) of the repeats of a timing."""
    warnings: tuple[str, ...] = ()
    """Reasons to distrust the constants."""

    def __post_init__(self) -> None:
        error = MeasuredConstantsInvalidError
        if not is_name(self.cluster):
            raise error(f"cluster={shown(self.cluster)} is not the name of a cluster")
        for name in ("host", "measured_at"):
            if not is_line(getattr(self, name)):
                raise error(f"{name}={shown(getattr(self, name))} is not a line of text")
        texts = {name: getattr(self, name) for name in ("versions", "fits", "timings", "warnings")}
        if found := document_problem(texts, visible_text_problem):
            raise error(": ".join(found))
        constants = read_mapping(self.constants, error, "constants")
        refuse_unknown(constants, MEASURED_FIELDS, error, "constant")
        # Any cluster with these constants: its construction refuses impossible ones.
        limits = {"num_nodes": 1, "devices_per_node": 1, "device_memory_bytes": 1}
        try:
            Cluster.from_mapping({"name": self.cluster, "device": "", **limits, **self.constants})
        except SearchSpaceError as why:
            raise error(f"constants: {why}") from why

    @property
    def source(self) -> str:
        """The text for the cluster's field `source`."""
        return f"{MEASURED_SOURCE} on {self.host}, {self.measured_at}"

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        plain = json.loads(json.dumps(asdict(self)))
        return {"format": FORMAT, "version": VERSION, **plain}

    @classmethod
    def from_mapping(cls, mapping: object) -> Self:
        """Reads it back; MeasuredConstantsInvalidError if it is invalid, or of a later version."""
        error = MeasuredConstantsInvalidError
        values = read_mapping(mapping, error, "the document")
        what = (values.pop("format", None), values.pop("version", None))
        if what != (FORMAT, VERSION):
            raise error(
                f"format={shown(what[0])} version={shown(what[1])} is not {FORMAT!r} {VERSION}"
            )
        refuse_unknown(values, [f.name for f in fields(cls)], error, "field")
        missing = [name for name in ("cluster", "host", "measured_at") if name not in values]
        if missing:
            raise error(f"{missing[0]} is missing")
        for name in ("fits", "timings", "warnings"):
            if not isinstance(values.get(name, []), list):
                raise error(f"{name}={shown(values[name])} is not a list")
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


def constants_file(data_dir: Path, cluster: str) -> Path:
    return data_dir / "measured" / f"{cluster.replace(os.sep, '_')}.json"


def refuse_unwritable(data_dir: Path) -> None:
    """Raises MeasuredConstantsInvalidError where the result of a measurement can't be written."""
    folder = data_dir / "measured"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise MeasuredConstantsInvalidError(f"{folder} can't be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise MeasuredConstantsInvalidError(f"{folder} is not writable")


def write_constants(data_dir: Path, measured: MeasuredConstants) -> Path:
    """Writes the constants as a whole or not at all; MeasuredConstantsInvalidError if it can't."""
    path = constants_file(data_dir, measured.cluster)
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        refuse_unwritable(data_dir)
        with new.open("w") as file:
            file.write(json.dumps(measured.to_mapping(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise MeasuredConstantsInvalidError(f"{path} can't be written: {error.strerror}") from error
    return path


def read_constants(data_dir: Path, cluster: str) -> MeasuredConstants | None:
    """A cluster's stored constants, None if unmeasured; MeasuredConstantsInvalidError if wrong."""
    path = constants_file(data_dir, cluster)
    advice = "run `layout-tuner calibrate` again, or remove the file"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return None
        raise MeasuredConstantsInvalidError(
            f"{path} is not a readable file of measured constants ({why_unreadable(error)}); {advice}"
        ) from error
    try:
        measured = MeasuredConstants.from_mapping(document)
    except MeasuredConstantsInvalidError as error:
        raise MeasuredConstantsInvalidError(f"{path}: {error}; {advice}") from error
    if measured.cluster != cluster:
        raise MeasuredConstantsInvalidError(
            f"{path}: the constants are those of cluster {measured.cluster!r}; {advice}"
        )
    return measured


def with_measured_constants(described: Any, data_dir: Path) -> Any:
    """A cluster's description with the constants that were measured on the cluster of that name.

    They replace the constants of the preset, and not those that the description states. A
    description that names neither a cluster nor a preset is returned unchanged.

    Raises:
        MeasuredConstantsInvalidError: the file of that cluster is invalid.
    """
    if isinstance(described, str):
        values = {"preset": described}
    elif isinstance(described, Mapping):
        values = dict(described)
    else:
        return described
    if set(values) == {"name"} and is_cluster_preset(values["name"]):
        values = {"preset": values["name"]}
    named = values["name"] if set(values) == {"name"} else values.get("preset")
    if not is_name(named) or ("preset" in values and not is_cluster_preset(named)):
        return described
    measured = read_constants(data_dir, str(named))
    if measured is None:
        return described
    return {**measured.constants, "source": measured.source, **values}
