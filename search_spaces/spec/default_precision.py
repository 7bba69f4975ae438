"""The default precision of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Precision

_ON_ACCELERATORS: Final[tuple[Precision, ...]] = ("bf16", "fp16", "fp32")
_ON_CPUS: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16")

STORED_WITHOUT: Final[Precision] = "fp32"
"""The precision of a stored campaign without one: the default when it was submitted."""


def default_precision(cluster: Cluster) -> Precision:
    """The usual precision of large models on a cluster.

    It is bf16 where the cluster states a peak for it, else fp16, else fp32. On CPU cores fp32 comes
    first, because most have no matrix units for 16 bits. A cluster without peaks gets fp32, which
    every device supports.
    """
    order = _ON_CPUS if cluster.has_cpu_devices else _ON_ACCELERATORS
    return next((each for each in order if each in cluster.peak_flops_per_s), "fp32")


def with_stored_precision(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a stored campaign, with the precision in its space.

    Campaigns are stored with all knobs. A campaign without a precision was stored when fp32 was the
    default, and keeps it.
    """
    space = document.get("space")
    if not isinstance(space, Mapping) or "preset" in space:
        return dict(document)
    return {**document, "space": {"precision": STORED_WITHOUT, **space}}
