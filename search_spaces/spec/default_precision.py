"""The default precision of layouts."""

from __future__ import annotations

from typing import Final

from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Precision

_ON_ACCELERATORS: Final[tuple[Precision, ...]] = ("bf16", "fp16", "fp32")
_ON_CPUS: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16")


def default_precision(cluster: Cluster) -> Precision:
    """The usual precision of large models on a cluster.

    It is bf16 where the cluster states a peak for it, else fp16, else fp32. On CPU cores fp32 comes
    first, because most have no matrix units for 16 bits. A cluster without peaks gets fp32, which
    every device supports.
    """
    order = _ON_CPUS if cluster.has_cpu_devices else _ON_ACCELERATORS
    return next((each for each in order if each in cluster.peak_flops_per_s), "fp32")
