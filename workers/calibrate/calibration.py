"""From timings of a machine to the constants that the estimates take. Needs no torch."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from layout_tuner.errors import MeasuredConstantsInvalidError
from layout_tuner.predictions.estimates.link_fit import LinkFit, fit_link
from layout_tuner.protocol.connection.data_home import default_data_dir
from layout_tuner.search_spaces.clusters.calibration_file import (
    MeasuredConstants,
    constants_file,
    read_constants,
)
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.errors import CalibrationFailedError
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.local import local_launcher
from layout_tuner.workers.packing.request import Share
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.trainer.product_layouts import (
    Product,
    fastest_layouts,
    products_in,
    products_of,
)
from layout_tuner.workers.trainer.revision import software_versions

NOISY: Final = 0.25
"""Spread of the repeats above which a warning says that the machine was busy."""

ROUGH_FIT: Final = 0.5
"""Error of a fitted link above which a warning says that it does not fit."""

_GRACE_S: Final = 120.0
"""Time in addition to the timings: start, rendezvous, the first use of every operation."""

Timings = Sequence[Mapping[str, Any]]


def calibrate(
    cluster: Cluster,
    *,
    seconds: float,
    on_event: Callable[[Document], None],
    models: Sequence[ModelShape] = (),
) -> MeasuredConstants:
    """Measures this machine for about so long, all of its devices at once, a rank on each.

    Of the models, the matrix products are timed in each layout of memory.

    Raises:
        CalibrationFailedError: a rank failed.
        WorkerError: the ranks could not be started.
    """
    with local_launcher(cluster) as launcher:
        ranks = launcher.devices_per_node
        precision: Precision = "fp32" if launcher.device == "cpu" else "bf16"
        products = [
            product
            for model in models
            for product in products_of(model, devices_per_node=ranks, precision=precision)
        ]
        job = {"kind": "calibrate", "seconds": seconds, "products": list(dict.fromkeys(products))}
        timings = _timings(launcher, ranks, job, on_event)
    return constants_of(timings, cluster=cluster.name, num_devices=ranks)


def calibrated_layouts(cluster: Cluster) -> dict[Product, str]:
    """The layouts of matrix products that are faster on this machine, from its data directory.

    Raises:
        MeasuredConstantsInvalidError: the file of that cluster is invalid.
    """
    directory = default_data_dir()
    measured = read_constants(directory, cluster.name)
    try:
        return {} if measured is None else fastest_layouts(measured.timings)
    except (LookupError, TypeError) as error:
        raise MeasuredConstantsInvalidError(
            f"{constants_file(directory, cluster.name)}: a timing of a product lacks a field ({error}); "
            "run `layout-tuner calibrate` again, or remove the file"
        ) from error


def with_products_of(
    before: MeasuredConstants | None, measured: MeasuredConstants
) -> MeasuredConstants:
    """A calibration without products, with those of the one before."""
    kept = () if before is None else products_in(before.timings)
    return replace(measured, timings=(*measured.timings, *kept))


def _timings(
    launcher: GroupLauncher,
    ranks: int,
    job: Mapping[str, Any],
    on_event: Callable[[Document], None],
) -> Timings:
    end = launcher.run_job(
        job,
        shares=(Share.of_first(0, ranks),),
        deadline_s=3 * job["seconds"] + _GRACE_S,
        on_event=lambda event: None if event["event"] == "listening" else on_event(event),
        cancelled=lambda: False,
    )
    if end.failure is not None:
        tail = f"\n{end.log_tail}" if end.log_tail else ""
        raise CalibrationFailedError(f"the machine was not measured: {end.failure.message}{tail}")
    timings: Timings = end.results[0]["timings"]
    return timings


def constants_of(timings: Timings, *, cluster: str, num_devices: int) -> MeasuredConstants:
    """The constants that follow from the timings, and warnings about them."""
    fits = dict(link_fits(timings))
    [host] = _of(timings, "host")
    constants: dict[str, Any] = {
        "peak_flops_per_s": _peaks(timings),
        "memory_bandwidth_bytes_per_s": float(
            max(timing["bytes"] / timing["seconds"] for timing in _of(timings, "stream"))
        ),
        "host_operation_s": float(host["seconds"] / host["operations"]),
    }
    if reduces := {ranks: fit for (name, ranks), fit in fits.items() if name == "all_reduce"}:
        constants["intra_node_bandwidth_bytes_per_s"] = {
            str(ranks): fit.bytes_per_s for ranks, fit in sorted(reduces.items())
        }
        constants["intra_node_latency_s"] = reduces[min(reduces)].latency_s
    noise = median(timing["spread"] for timing in timings)
    versions = software_versions()
    return MeasuredConstants(
        cluster=cluster,
        host=socket.gethostname() or platform.node(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: versions[name] for name in ("python", "torch", "git_revision")},
        num_devices=num_devices,
        constants=constants,
        fits=tuple(
            {"operation": name, "ranks": ranks, **asdict(fit)}
            for (name, ranks), fit in fits.items()
        ),
        timings=tuple(timings),
        noise=noise,
        warnings=tuple(_warnings(noise, fits)),
    )


def link_fits(timings: Timings) -> Iterator[tuple[tuple[str, int], LinkFit]]:
    """Latency of a step and bandwidth of a rank, for each operation and number of ranks.

    A ring moves (n - 1) / n of the bytes in n - 1 steps, an all-reduce twice that
    (arXiv:1802.05799, section 3); a transfer there and back is two of one step each.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for timing in timings:
        if "ranks" in timing:
            groups.setdefault((timing["operation"], timing["ranks"]), []).append(timing)
    for (operation, ranks), members in groups.items():
        steps, share = _rounds(operation, ranks)
        fit = fit_link(
            [share * timing["bytes"] / steps for timing in members],
            [timing["seconds"] / steps for timing in members],
        )
        name = "transfer" if operation == "transfer_and_back" else operation
        yield (name, ranks), fit


def _rounds(operation: str, ranks: int) -> tuple[int, float]:
    """Steps of an operation, and how many times its bytes a rank sends in all of them."""
    if operation == "transfer_and_back":
        return 2, 2.0
    rounds = 2 if operation == "all_reduce" else 1
    return rounds * (ranks - 1), rounds * (ranks - 1) / ranks


def _peaks(timings: Timings) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for timing in _of(timings, "matmul"):
        flops = 2.0 * timing["rows"] * timing["columns"] * timing["inner"]
        precision = timing["precision"]
        peaks[precision] = max(peaks.get(precision, 0.0), flops / timing["seconds"])
    return peaks


def _of(timings: Timings, operation: str) -> list[Mapping[str, Any]]:
    return [timing for timing in timings if timing["operation"] == operation]


def _warnings(noise: float, fits: Mapping[tuple[str, int], LinkFit]) -> Iterator[str]:
    if noise > NOISY:
        yield (
            f"repeats of one timing differ by {noise:.0%} from quartile to quartile (over "
            f"{NOISY:.0%}): the machine was busy with something else; measure again when it is not"
        )
    for (operation, ranks), fit in fits.items():
        if fit.error > ROUGH_FIT:
            yield (
                f"{operation} over {ranks} ranks does not fit a latency and a bandwidth: the error is "
                f"{fit.error:.0%}"
            )
