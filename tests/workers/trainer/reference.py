"""An independent reference: the same models in plain torch, one process, no flat buffers.

It shares nothing with the trainer but the initial weights and the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from search_spaces.spec.model_shape import ModelShape


class ReferenceModel(nn.Module):
    def __init__(self, shape: ModelShape, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        self.names = list(weights)
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value.clone()) for name, value in weights.items()}
        )

    def named_weights(self) -> dict[str, Tensor]:
        return {name: self.weight(name).detach() for name in self.names}

    def weight(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def optional(self, name: str) -> Tensor | None:
        return self.weight(name) if name in self.names else None

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(f"{name}.weight"), self.optional(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, size = self.weight(f"{name}.weight"), (x.shape[-1],)
        if self.shape.family == "llama":
            return F.rms_norm(x, size, weight, 1e-5)
        return F.layer_norm(x, size, weight, self.weight(f"{name}.bias"), 1e-5)

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        batch, seq, _ = x.shape
        size, shape = self.shape.head_size, self.shape
        q = self.linear(x, f"{prefix}.query").view(batch, seq, shape.num_heads, size)
        k = self.linear(x, f"{prefix}.key").view(batch, seq, shape.num_kv_heads, size)
        v = self.linear(x, f"{prefix}.value").view(batch, seq, shape.num_kv_heads, size)
        if shape.family == "llama":
            q, k = (rotate_half(x, self.shape.rotary_base) for x in (q, k))
        repeat = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / size**0.5
        future = torch.ones(seq, seq).triu(1).bool()
        attended = scores.masked_fill(future, float("-inf")).softmax(-1)
        y = torch.einsum("bnqk,bknd->bqnd", attended, v).reshape(batch, seq, -1)
        return self.linear(y, f"{prefix}.out")

    def feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        up = self.linear(x, f"{prefix}.up")
        if self.shape.family == "llama":
            inner = F.silu(self.linear(x, f"{prefix}.gate")) * up
        else:
            inner = F.gelu(up, approximate="tanh")
        return self.linear(inner, f"{prefix}.down")

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.weight("embedding.weight")[ids]
        if self.shape.family == "gpt":
            x = x + self.weight("positions.weight")
        for i in range(self.shape.num_layers):
            layer = f"layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.attention_norm"), f"{layer}.attention")
            normal = self.norm(x, f"{layer}.feed_forward_norm")
            x = x + self.feed_forward(normal, f"{layer}.feed_forward")
        head = "embedding.weight" if self.shape.tied_embeddings else "head.weight"
        logits = F.linear(self.norm(x, "final_norm"), self.weight(head))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate_half(x: Tensor, base: float) -> Tensor:
    """Rotary positions by complex multiplication of the pairs (i, i + D/2)."""
    seq, size = x.shape[1], x.shape[3]
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(seq, dtype=torch.float64)[:, None, None] * frequencies
    pairs = torch.complex(x[..., : size // 2].double(), x[..., size // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def train_reference(
    shape: ModelShape,
    weights: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: object,
    *,
    clip_grad_norm: float | None = None,
    make_model: type[ReferenceModel] = ReferenceModel,
    passes: Callable[[], AbstractContextManager[object]] = nullcontext,
    after_backward: Callable[[ReferenceModel, int], None] = lambda model, step: None,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights over these global batches (ids, targets).

    Args:
        passes: entered for the passes forward and backward of each step.
        after_backward: may change the gradients of a step.
    """
    model = make_model(shape, weights)
    optimizer = make_optimizer(model.parameters())  # type: ignore[operator]
    losses, norms = [], []
    for step, (ids, targets) in enumerate(batches):
        optimizer.zero_grad()
        with passes():
            loss = model(ids, targets)
            loss.backward()
        after_backward(model, step)
        limit = float("inf") if clip_grad_norm is None else clip_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.named_weights()
