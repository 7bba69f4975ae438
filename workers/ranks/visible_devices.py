"""Which variables let a process see exactly the devices that it was given, and no others.

The runtimes filter on two levels. ROCm's lower one (HSA) reads ROCR_VISIBLE_DEVICES; HIP above it reads
HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is unset or empty, and its numbers count *within*
the lower list. CUDA reads CUDA_VISIBLE_DEVICES alone. A list is read up to its first entry that
names no device; an empty one hides every device on ROCm's lower level and in CUDA. Batch systems
set some of these, Ray sets and empties others, and whoever starts a rank can't tell whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from workers.errors import DeviceHiddenError

ROCR: Final = "ROCR_VISIBLE_DEVICES"
HIP: Final = "HIP_VISIBLE_DEVICES"
CUDA: Final = "CUDA_VISIBLE_DEVICES"

_HIDES_ALL: Final = frozenset({"", "-1", "none", "void", "NoDevFiles"})
"""What Slurm, Ray and users write for "no device"."""

_LEFT_ALONE_BY_RAY: Final = {
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def rank_variables(device_index: int, environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that let a rank see its own device alone, as number 0, on ROCm and CUDA alike.

    Args:
        device_index: the device, counted among those that the environment shows.
        environment: of whoever starts the rank. Lists that hide every device are taken for unset:
            they are Ray's, for actors that asked for none.

    Returns:
        The values to set; None: the variable must be unset.

    Raises:
        DeviceHiddenError: the environment shows fewer devices.
    """
    rocr, hip, cuda = (_entries(environment.get(name)) for name in (ROCR, HIP, CUDA))
    return {
        ROCR: None if rocr is None else ",".join(rocr),
        HIP: _entry(device_index, _within(rocr, hip, cuda), HIP if hip else CUDA, rocr),
        CUDA: str(device_index) if cuda is None else _cuda_entry(device_index, cuda, rocr, hip),
    }


def ray_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that a Ray node starts with, so that its agent sees what the environment shows.

    Ray refuses to work where ROCR_VISIBLE_DEVICES is set and HIP_VISIBLE_DEVICES is not: both
    levels are put together into the upper one. Ray is asked to leave the lists alone after that.
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
    """The devices that a list names; None: it is unset, or hides all."""
    entries = []
    for part in (value or "").split(","):
        if (entry := part.strip()) in _HIDES_ALL:
            break  # the runtimes read no further
        entries.append(entry)
    return entries or None


def _within(
    rocr: Sequence[str] | None, hip: Sequence[str] | None, cuda: Sequence[str] | None
) -> Sequence[str] | None:
    """The list that HIP goes by, up to the first number beyond the list below; None: by none.

    One that would hide every device is no list: sites set CUDA's to the same numbers as ROCR's.
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
    """What an entry of the upper list is called without the lower one; a UUID is called the same."""
    return rocr[int(entry)] if entry.isdecimal() else entry


def _entry(index: int, shown: Sequence[str] | None, name: str, rocr: Sequence[str] | None) -> str:
    """What HIP is told."""
    if shown is not None:
        return _pick(index, shown, name)
    if rocr is not None:
        _pick(index, rocr, ROCR)
    return str(index)


def _cuda_entry(
    index: int, cuda: Sequence[str], rocr: Sequence[str] | None, hip: Sequence[str] | None
) -> str:
    """What CUDA is told: on a machine of ROCm's, whose own lists are there, nobody reads it."""
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
