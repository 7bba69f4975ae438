"""Why a probe waits, in sentences for people."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from workers.packing.request import PackRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """What a probe that waits can hope for."""

    request: PackRequest
    whole: bool
    """Whether it needs whole nodes."""
    num_nodes: int
    """Nodes of the allocation that are large enough for it."""
    num_usable: int
    """Those of them that are usable."""
    unusable: Mapping[str, str]
    """Why each of the others isn't, by name."""
    num_free: int
    """Whole nodes that are free; or the most contiguous devices of a node that are."""
    starts_in_s: float | None
    """Seconds until there are enough, at the latest; None: not as things are."""
    ends_in_s: float | None
    """Seconds until the allocation ends; None: it doesn't."""
    behind: Hashable | None
    """The probe that free devices are kept for; None: it would be this one."""


def why_it_waits(prospect: Prospect) -> str:
    """The sentence, without a full stop."""
    request = prospect.request
    if prospect.num_nodes < request.num_nodes:
        return f"needs {_needs(prospect)}, and the allocation has {_has(prospect)}"
    if prospect.num_usable < request.num_nodes:
        unusable = ", ".join(f"{name} is {why}" for name, why in prospect.unusable.items())
        return (
            f"needs more nodes than are usable: {prospect.num_usable} of {request.num_nodes}; "
            f"{unusable}"
        )
    if prospect.ends_in_s is not None and request.at_most_s > prospect.ends_in_s:
        return (
            f"does not fit before the allocation ends in {max(0.0, prospect.ends_in_s):.0f} s: "
            f"it may take {request.at_most_s:.0f} s"
        )
    return _waits(prospect)


def _waits(prospect: Prospect) -> str:
    request = prospect.request
    waits = f"waits for {_needs(prospect)}"
    if prospect.starts_in_s is None:
        return f"{waits}: not on the nodes where it failed before, and no others are usable"
    free = f"{prospect.num_free or 'none'} {'are' if prospect.num_free > 1 else 'is'} free"
    needed = request.num_nodes if prospect.whole else request.num_devices
    if prospect.num_free >= needed:
        kept = f"kept for {prospect.behind}, which has waited longer"
        return f"{waits}: {free}, {kept if prospect.behind is not None else 'so it starts next'}"
    if prospect.behind is not None:
        return f"{waits}: {free}; {prospect.behind} has waited longer"
    return f"{waits}: {free}, enough are in {prospect.starts_in_s:.0f} s at the latest"


def _needs(prospect: Prospect) -> str:
    request = prospect.request
    if prospect.whole:
        return f"{request.num_nodes} whole {_nodes(request.num_nodes)}"
    many = "device" if request.num_devices == 1 else "contiguous devices"
    return f"{request.num_devices} {many} of a node"


def _has(prospect: Prospect) -> str:
    per_node = prospect.request.per_node
    return f"{prospect.num_nodes} {_nodes(prospect.num_nodes)} of {per_node} devices or more"


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"
