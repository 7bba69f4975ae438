"""How long the enumeration of a space takes, and what is done with the legal set afterwards.

Run as `make bench-enumerate`, or `python benchmarks/bench_enumerate.py`. The promise to keep: a space
of 10^6 combinations in under a second.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

from search_spaces.cluster import Cluster
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.model_shape import ModelShape
from search_spaces.presets.clusters import CLUSTER_PRESETS
from search_spaces.presets.models import model_preset
from search_spaces.presets.spaces import resolve_space
from search_spaces.rules import ALL_SCOPES
from search_spaces.space import SearchSpace, enumerate_legal

REPEATS = 7
FRONTIER = CLUSTER_PRESETS["frontier"]
GPT_175B = model_preset("gpt-175b")


def main() -> None:
    """Prints a line of figures for each space."""
    print(
        f"{'space':<28}{'combinations':>13}{'legal':>11}{'enumerate':>11}{'peak':>10}"
        f"{'columns':>10}{'estimate':>10}{'layout':>9}{'index_of':>10}"
    )
    for name, space in _spaces().items():
        print(f"{name:<28}{_figures(space, GPT_175B, FRONTIER)}")


def _spaces() -> dict[str, SearchSpace]:
    wide = {"from": 1, "to": 64}
    return {
        "paper-table-v": resolve_space("paper-table-v"),
        "fixed batch, all derived": SearchSpace(
            global_batch_size=4096,
            num_nodes={"from": 1, "to": 1024, "times": 2},
            tp={"from": 1, "to": 16, "times": 2},
            pp={"from": 1, "to": 24},
            vpp={"from": 1, "to": 8},
            micro_batch_size={"from": 1, "to": 32},
            zero_stage=[0, 1],
            recompute=["none", "full"],
            precision=["fp32", "bf16"],
        ),
        "bounded batch, mostly legal": SearchSpace(
            global_batch_size={"min": 1, "max": 1 << 20},
            num_nodes=[8, 16, 32, 64],
            tp=[1, 2, 4, 8],
            pp=[1, 2, 4, 8],
            micro_batch_size=wide,
            num_microbatches={"from": 1, "to": 128},
            zero_stage=[0, 1],
            recompute=["none", "full"],
            precision=["fp32", "bf16"],
        ),
    }


def _figures(space: SearchSpace, model: ModelShape, cluster: Cluster) -> str:
    # fp16 is in the paper's table but not in the embedded trainer: its scope is left out.
    scopes = ALL_SCOPES - {"trainer"}
    legal = enumerate_legal(space, model, cluster, scopes=scopes)
    tracemalloc.start()
    enumerate_legal(space, model, cluster, scopes=scopes)
    peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    enumerating = _median_s(lambda: enumerate_legal(space, model, cluster, scopes=scopes))
    start = time.perf_counter()
    columns = legal.columns
    materialising = time.perf_counter() - start
    estimating = _median_s(lambda: peak_memory_bytes(columns, model))
    positions = range(0, len(legal), max(len(legal) // 10_000, 1))
    start = time.perf_counter()
    layouts = [legal.layout(position) for position in positions]
    building = (time.perf_counter() - start) / len(layouts)
    start = time.perf_counter()
    for layout in layouts:
        legal.index_of(layout)
    finding = (time.perf_counter() - start) / len(layouts)
    return (
        f"{space.num_combinations:>13,}{len(legal):>11,}{enumerating * 1e3:>8.1f} ms"
        f"{peak_mib:>6.0f} MiB{materialising * 1e3:>7.0f} ms{estimating * 1e3:>7.0f} ms"
        f"{building * 1e6:>6.1f} us{finding * 1e6:>7.1f} us"
    )


def _median_s(act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
