"""Reading the fields of a site: what YAML and JSON spell, turned into what `Site` holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from search_spaces.reading import (
    is_positive_number,
    read_mapping,
    shown,
    whole_number_problem,
)
from workers.slurm.errors import SiteInvalidError
from workers.slurm.walltime import read_walltime_s

_CORES: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def refuse_unless(holds: object, name: str, value: object, what: str) -> None:
    if not holds:
        raise SiteInvalidError(f"{shown(value)} is not {what}", field=name)


def _texts(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise SiteInvalidError(f"{shown(value)} is not a list of texts", field=name)


def _variables(value: object, name: str) -> dict[str, str]:
    values = read_mapping(value, SiteInvalidError, name)
    for variable, text in values.items():
        if not isinstance(text, str):
            raise SiteInvalidError(
                f"{shown(text)} is not a text; put it in quotes", field=f"{name}.{variable}"
            )
    return values


def _text(value: object, name: str) -> str:
    refuse_unless(isinstance(value, str), name, value, "a text")
    return str(value)


def _truth(value: object, name: str) -> bool:
    refuse_unless(isinstance(value, bool), name, value, "true or false")
    return bool(value)


def _optional_truth(value: object, name: str) -> bool | None:
    return None if value is None else _truth(value, name)


def _number(value: object, name: str) -> float:
    if is_positive_number(value):
        return float(value)
    raise SiteInvalidError(f"{shown(value)} is not a number over 0", field=name)


def _optional_count(value: object, name: str) -> int | None:
    if value is None:
        return None
    if problem := whole_number_problem(value):
        raise SiteInvalidError(problem, field=name)
    assert isinstance(value, int)
    return value


def _max_times(value: object, name: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SiteInvalidError(
            f"{shown(value)} is not a mapping from most nodes to longest times, as {{91: 2h}}",
            field=name,
        )
    limits = {}
    for key, time in value.items():
        # JSON, in which the file travels inside the batch script, knows no other keys than texts.
        nodes = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,9}", key) else key
        if problem := whole_number_problem(nodes):
            raise SiteInvalidError(f"the number of nodes {problem}", field=name)
        limits[nodes] = read_walltime_s(time, field=f"{name}[{nodes}]")
    return limits


def _max_times_by_name(value: object, name: str) -> dict[str, dict[int, float]]:
    values = read_mapping(value, SiteInvalidError, name)
    return {key: _max_times(limits, f"{name}.{key}") for key, limits in values.items()}


def _device_cores(value: object, name: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise SiteInvalidError(
            f'{shown(value)} is not a list of ranges, as ["0-7", "8-15"]', field=name
        )
    devices = tuple(_cores(item, name) for item in value)
    cores = [core for device in devices for core in device]
    if len(set(cores)) != len(cores):
        raise SiteInvalidError("a core stands at two devices", field=name)
    if len({len(device) for device in devices}) > 1:
        raise SiteInvalidError("devices have unequal numbers of cores", field=name)
    return devices


def _cores(value: object, name: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in str(value).split(","):
        match = _CORES.fullmatch(part.strip())
        if match is None:
            raise SiteInvalidError(f'{shown(value)} is not a range of cores as "49-55"', field=name)
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    refuse_unless(cores, name, value, "a range of cores with a core in it")
    return tuple(cores)


READERS: Final[Mapping[str, Callable[[object, str], Any]]] = MappingProxyType(
    {
        "modules": _texts,
        "setup": _texts,
        "environment": _variables,
        "environment_of_several_nodes": _variables,
        "sbatch": _texts,
        "srun": _texts,
        "devices_option": _text,
        "needs_account": _truth,
        "max_time": _max_times,
        "max_time_by_partition": _max_times_by_name,
        "max_time_by_qos": _max_times_by_name,
        "launcher": _text,
        "share_nodes": _optional_truth,
        "drain_s": _number,
        "node_address": _text,
        "cores_per_node": _optional_count,
        "device_cores": _device_cores,
        "node_local_dir": _text,
        "http_proxy": _text,
        "no_proxy": _texts,
    }
)
"""How each field of a site is read from YAML or JSON: from the value and the field's name."""
