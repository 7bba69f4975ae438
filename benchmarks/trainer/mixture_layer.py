"""The layer with experts beside a loop over experts, and beside a dense layer of the same work.

A part of `make bench-trainer`; alone: `python -m benchmarks.trainer.mixture_layer`. One rank,
forward and backward, from the normalised input to the gradients of input and weights. Experts get
equally many tokens, in turn.

Shapes: T tokens, H hidden, E experts, K of them a token, F their width.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.results_file import describe_machine, record
from benchmarks.workers.forked_ranks import restart_with_rank_environment
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.rank_mesh import Coordinates
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.model import Block, RankModel
from layout_tuner.workers.trainer.parallel.flat_buffers import FlatBuffers

HIDDEN: Final = 1024
NUM_ROUNDS: Final = 9
LOOP, DENSE = "a loop over experts", "a dense layer of the same work"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer: its experts, and the tokens that each of them gets."""

    num_experts: int
    per_token: int
    tokens_each: int
    width: int
    asked: Mapping[str, float]
    """By peer, how many times longer it should take."""

    @property
    def num_tokens(self) -> int:
        return self.num_experts * self.tokens_each // self.per_token


CASES: Final = (
    Case(num_experts=8, per_token=2, tokens_each=256, width=2048, asked={LOOP: 1.05, DENSE: 0.8}),
    Case(num_experts=128, per_token=8, tokens_each=32, width=384, asked={LOOP: 1.05, DENSE: 0.4}),
)


def layer_of(case: Case, dtype: torch.dtype, *, is_dense: bool) -> nn.Module:
    """The trainer's own layer, with memory for weights and gradients."""
    shape = ModelShape(
        name="layer",
        family="llama",
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=case.width,
        num_heads=8,
        num_kv_heads=8,
        seq_length=case.num_tokens,
        vocab_size=8,
        tied_embeddings=False,
        num_experts=case.num_experts,
        experts_per_token=case.per_token,
        moe_ffn_hidden_size=case.width,
    )
    mesh = Mesh(
        layout=Layout(),
        rank=0,
        place=Coordinates(tp_rank=0, dp_rank=0, pp_rank=0),
        tp_group=None,
        pp_group=None,
        embedding_group=None,
    )
    model = RankModel(shape.dense if is_dense else shape, mesh)
    flat = FlatBuffers(model, mesh, dtype=dtype, device=torch.device("cpu"), seed=0)
    flat.expect_gradients(1 << 30)
    for mixture in model.mixtures:
        mixture.balanced = True
    (block,) = model.stages[0].blocks
    assert isinstance(block, Block)
    return block.feed_forward


class Loop(nn.Module):
    """The same mixture as a loop: each expert's tokens by index, its weights unbound."""

    router: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = {
            "router": (case.num_experts, HIDDEN),
            "up": (case.num_experts, 2 * case.width, HIDDEN),
            "down": (case.num_experts, HIDDEN, case.width),
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(0.02 * torch.randn(size, dtype=dtype)))
        self.case = case

    def forward(self, x_TH: Tensor, residual_TH: Tensor) -> Tensor:
        case = self.case
        logits_TE = F.linear(x_TH.float(), self.router.float())
        experts_TK = logits_TE.topk(case.per_token).indices
        places_T1 = torch.arange(len(x_TH))[:, None] * case.per_token
        experts_TK = (places_T1 + torch.arange(case.per_token)) % case.num_experts
        weights_TK = logits_TE.gather(1, experts_TK).softmax(-1)
        y_TH = residual_TH.clone()
        for expert, (up, down) in enumerate(zip(self.up.unbind(), self.down.unbind(), strict=True)):
            tokens, choices = torch.where(experts_TK == expert)
            gate, value = F.linear(x_TH[tokens], up).chunk(2, dim=-1)
            own = F.linear(F.silu(gate) * value, down)
            weighted = own * weights_TK[tokens, choices, None].to(own.dtype)
            y_TH = y_TH.index_add(0, tokens, weighted)
        return y_TH


def seconds_of(layer: nn.Module, num_tokens: int, dtype: torch.dtype) -> Callable[[], float]:
    """Times one pass forward and backward."""
    generator = torch.Generator().manual_seed(0)
    x_TH, residual_TH, grad_TH = (
        torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype) for _ in range(3)
    )
    x_TH.requires_grad_()

    def run() -> float:
        x_TH.grad = None
        start = time.perf_counter()
        layer(x_TH, residual_TH).backward(grad_TH)
        return time.perf_counter() - start

    return run


def rows() -> list[str]:
    """The table, a line for each case, type and peer; printed as it grows."""
    found = [
        "| experts, tokens of each, width | type | against | asked | pairs (quartiles) | reached | "
        "ours |",
        "| --- | --- | --- | --: | --: | --: | --: |",
    ]
    print("\n".join(found), flush=True)
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            ours = seconds_of(layer_of(case, dtype, is_dense=False), case.num_tokens, dtype)
            dense = layer_of(case, dtype, is_dense=True)
            peers = {
                LOOP: seconds_of(Loop(case, dtype), case.num_tokens, dtype),
                DENSE: seconds_of(dense, case.num_tokens * case.per_token, dtype),
            }
            for name, peer in peers.items():
                for each in (ours, peer):
                    each()
                pairs = [(ours(), peer()) for _ in range(NUM_ROUNDS)]
                low, ratio, high = statistics.quantiles([b / a for a, b in pairs])
                reached = "yes" if ratio >= case.asked[name] else "**no**"
                own_ms = 1e3 * statistics.median(a for a, _ in pairs)
                kind = str(dtype).removeprefix("torch.")
                found.append(
                    f"| {case.num_experts}, {case.tokens_each}, {case.width} | {kind} | {name} | "
                    f"{case.asked[name]:.2f} | {ratio:.3f} ({low:.3f} to {high:.3f}) | {reached} | "
                    f"{own_ms:.0f} ms |"
                )
                print(found[-1], flush=True)
    return found


def main() -> None:
    restart_with_rank_environment()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    machine = describe_machine("torch")
    print(machine, end="\n\n", flush=True)
    table = "\n".join(rows())
    if "--record" in sys.argv[1:]:
        how = (
            f"`make bench-trainer`; {machine}. One layer, hidden {HIDDEN}, one rank: how many "
            "times longer the peer takes for a pass forward and backward. Passes alternate. The "
            "dense layer takes as many rows as all experts together, at the width of one."
        )
        record("Layers with experts", f"{how}\n\n{table}")


if __name__ == "__main__":
    main()
