"""Times the enumeration of a space, and what is done with the legal set afterwards.

Run as `make bench-enumerate`, or `python -m benchmarks.bench_enumerate`. It prints the section
"Enumeration" of `benchmarks/RESULTS.md`, and fails if 10^6 combinations take a second or longer.
"""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.results_file import describe_machine
from benchmarks.timing import median_s
from layout_tuner.errors import ModelTooLargeError
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.spaces.search_space import LegalSet, SearchSpace, enumerate_legal
from layout_tuner.search_spaces.spaces.space_presets import resolve_space
from layout_tuner.tuner.strategies.deephyper import KnobRanks
from layout_tuner.units import GIB

REPEATS = 7
_median_s = partial(median_s, repeats=REPEATS)
PROMISED_S = 1.0
"""Most seconds for 10^6 combinations."""
FRONTIER = CLUSTER_PRESETS["frontier"]
GPT_175B = model_preset("gpt-175b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one space cost."""

    num_combinations: int
    num_legal: int
    enumerate_s: float
    """Every rule over every combination."""
    enumerate_peak_bytes: int
    """Memory of the enumeration at its most, the legal set included."""
    accept_s: float
    """Finding a layout that fits into a device of 64 GiB."""
    refuse_s: float
    """Finding that none fits into a device of 1 GiB: the estimate of every one."""
    encode_s: float
    """Every legal layout as a point for DeepHyper."""
    layout_s: float
    """One layout by its position."""
    index_of_s: float
    """The position of one layout."""

    def row(self, name: str) -> str:
        """A row of the table."""
        cells = (
            name,
            f"{self.num_combinations:,}",
            f"{self.num_legal:,}",
            f"{self.enumerate_s * 1e3:.1f} ms",
            f"{self.enumerate_peak_bytes / 2**20:.1f} MiB",
            f"{self.accept_s * 1e3:.1f} ms",
            f"{self.refuse_s * 1e3:.0f} ms",
            f"{self.encode_s * 1e3:.0f} ms",
            f"{self.layout_s * 1e6:.0f} us",
            f"{self.index_of_s * 1e6:.0f} us",
        )
        return f"| {' | '.join(cells)} |"


HEADER = """\
| space | combinations | legal | enumerate | its peak | accept | refuse | encode | layout | index_of |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


def main() -> None:
    """Prints the table, a row a space."""
    print(describe_machine("numpy"), end="\n\n")
    print(HEADER)
    broken = []
    for name, space in _spaces().items():
        figures = _measure(space)
        print(figures.row(name), flush=True)
        if figures.enumerate_s * 1e6 > PROMISED_S * max(figures.num_combinations, 1e6):
            broken.append(name)
    if broken:
        sys.exit(f"10^6 combinations took more than {PROMISED_S} s in: {', '.join(broken)}")


def _spaces() -> dict[str, SearchSpace]:
    fixed = SearchSpace(
        global_batch_size=4096,
        num_nodes={"from": 1, "to": 1024, "times": 2},
        tp={"from": 1, "to": 16, "times": 2},
        pp={"from": 1, "to": 24},
        vpp={"from": 1, "to": 8},
        micro_batch_size={"from": 1, "to": 32},
        zero_stage=[0, 1],
        recompute=["none", "full"],
        precision=["fp32", "bf16"],
    )
    bounded = SearchSpace(
        global_batch_size={"min": 1, "max": 1 << 20},
        num_nodes=[8, 16, 32, 64],
        tp=[1, 2, 4, 8],
        pp=[1, 2, 4, 8],
        micro_batch_size={"from": 1, "to": 64},
        num_microbatches={"from": 1, "to": 32},
        zero_stage=[0, 1],
        recompute=["none", "full"],
        precision=["fp32", "bf16"],
    )
    most = {"from": 1, "to": 152}
    return {
        "paper-table-v": resolve_space("paper-table-v"),
        "batch fixed, dp derived": fixed,
        "10^6, mostly legal": bounded,
        "the most that is accepted, mostly legal": replace(bounded, num_microbatches=most),
    }


def _measure(space: SearchSpace) -> Figures:
    legal = enumerate_legal(space, GPT_175B, FRONTIER)
    tracemalloc.start()
    enumerate_legal(space, GPT_175B, FRONTIER)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    positions = range(0, len(legal), max(len(legal) // 10_000, 1))
    layouts = [legal.layout(position) for position in positions]
    return Figures(
        num_combinations=space.num_combinations,
        num_legal=len(legal),
        enumerate_s=_median_s(lambda: enumerate_legal(space, GPT_175B, FRONTIER)),
        enumerate_peak_bytes=peak_bytes,
        accept_s=_median_s(lambda: _judge_memory(legal, device_memory_bytes=64 * GIB)),
        refuse_s=_median_s(lambda: _judge_memory(legal, device_memory_bytes=GIB)),
        encode_s=_median_s(lambda: KnobRanks(legal)),
        layout_s=_median_s(lambda: [legal.layout(i) for i in positions]) / len(layouts),
        index_of_s=_median_s(lambda: [legal.index_of(layout) for layout in layouts]) / len(layouts),
    )


def _judge_memory(legal: LegalSet, *, device_memory_bytes: int) -> None:
    """What the service does with a campaign that is submitted."""
    spec = CampaignSpec(
        name="bench",
        model=GPT_175B,
        cluster=replace(FRONTIER, device_memory_bytes=device_memory_bytes),
        space=legal.space,
        budget=Budget(trials=1),
    )
    with contextlib.suppress(ModelTooLargeError):
        spec.refuse_if_too_large(legal)


if __name__ == "__main__":
    main()
