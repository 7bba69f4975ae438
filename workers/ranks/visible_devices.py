"""Environment variables with which a process sees exactly the devices that it was given.

The runtimes filter on two levels. ROCm's lower level (HSA) reads ROCR_VISIBLE_DEVICES. HIP above it
reads HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is unset or empty, and its numbers
count *within* the lower list. CUDA reads only CUDA_VISIBLE_DEVICES. A list is read up to the first
entry that is no device; an empty list hides every device on ROCm's lower level and in CUDA. Batch
systems set some of these variables and Ray sets or empties others, so their origin is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from layout_tuner.workers.errors import DeviceHiddenError

ROCR: Final = "ROCR_VISIBLE_DEVICES"
HIP: Final = "HIP_VISIBLE_DEVICES"
CUDA: Final = "CUDA_VISIBLE_DEVICES"

_HIDES_ALL: Final = frozenset({"", "-1", "none", "void", "NoDevFiles"})
"""Entries by which Slurm, Ray and users mean "no device"."""

_LEFT_ALONE_BY_RAY: Final = {
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def rank_variables(devices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Variables with which a rank sees only some devices, numbered from 0, on ROCm and on CUDA.

    Args:
        devices: the devices, counted among those that the environment shows.
        environment: of the process that starts the rank. Lists that hide every device count as
            unset: Ray sets them for actors that request no device.

    Returns:
        The values to set; None: the variable must be unset.

    Raises:
        DeviceHiddenError: the environment shows fewer devices.
    """
    rocr, hip, cuda = (_entries(environment.get(name)) for name in (ROCR, HIP, CUDA))
    shown = _within(rocr, hip, cuda)
    return {
        ROCR: None if rocr is None else ",".join(rocr),
        HIP: ",".join(_entry(index, shown, HIP if hip else CUDA, rocr) for index in devices),
        CUDA: ",".join(
            str(index) if cuda is None else _cuda_entry(index, cuda, rocr, hip) for index in devices
        ),
    }


def ray_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Variables for the start of a Ray node whose agent sees the devices of the environment.

    Ray refuses to work where ROCR_VISIBLE_DEVICES is set and HIP_VISIBLE_DEVICES is not, so both
    levels are combined in the upper one. Further variables make Ray keep the lists.
    """
    rocr, hip, cuda = (_entries(environment.get(name)) for name in (ROCR, HIP, CUDA))
    shown = _within(rocr, hip, cuda)
    if rocr is not None:
        shown = rocr if shown is None else [_below(entry, rocr) for entry in shown]
    return {
        **_LEFT_ALONE_BY_RAY,
        ROCR: None,
        HIP: None if shown is None else ",".join(shown),
        CUDA: None if cuda is None else ",".join(cuda),
    }


def with_variables(
    environment: Mapping[str, str], variables: Mapping[str, str | None]
) -> dict[str, str]:
    """The environment with these variables set, or unset."""
    changed = {**environment, **variables}
    return {name: value for name, value in changed.items() if value is not None}


def _entries(value: str | None) -> list[str] | None:
    """The devices in a list; None: it is unset, or hides all."""
    entries = []
    for part in (value or "").split(","):
        if (entry := part.strip()) in _HIDES_ALL:
            break  # the runtimes read no further
        entries.append(entry)
    return entries or None


def _within(
    rocr: Sequence[str] | None, hip: Sequence[str] | None, cuda: Sequence[str] | None
) -> Sequence[str] | None:
    """The list that HIP uses, up to the first number beyond the lower list; None: it uses none.

    A list that would hide every device is ignored: sites set CUDA's list to the numbers of ROCR's.
    """
    upper = hip or cuda
    if upper is None or rocr is None:
        return upper
    seen = []
    for entry in upper:
        if entry.isdecimal() and int(entry) >= len(rocr):
            break
        seen.append(entry)
    return seen or None


def _below(entry: str, rocr: Sequence[str]) -> str:
    """An entry of the upper list as an entry without the lower list; UUIDs are the same."""
    return rocr[int(entry)] if entry.isdecimal() else entry


def _entry(index: int, shown: Sequence[str] | None, name: str, rocr: Sequence[str] | None) -> str:
    """The value for HIP."""
    if shown is not None:
        return _pick(index, shown, name)
    if rocr is not None:
        _pick(index, rocr, ROCR)
    return str(index)


def _cuda_entry(
    index: int, cuda: Sequence[str], rocr: Sequence[str] | None, hip: Sequence[str] | None
) -> str:
    """The value for CUDA; it is not read on a ROCm machine, which has lists of its own."""
    if index >= len(cuda) and (rocr or hip):
        return str(index)
    return _pick(index, cuda, CUDA)


def _pick(index: int, shown: Sequence[str], name: str) -> str:
    if index >= len(shown):
        raise DeviceHiddenError(
            f"device {index} of this node is hidden: {name}={','.join(shown)} shows {len(shown)}; "
            "ask the batch system for all devices of the node, or describe a smaller one"
        )
    return shown[index]
