"""An independent reference: the same models in plain torch, one process, no flat buffers.

It shares nothing with the trainer but the initial weights and the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layout_tuner.search_spaces.models.layer_kinds import sublayers_of
from layout_tuner.search_spaces.models.model_shape import ModelShape


def router_gap(chances: Tensor, per_token: int) -> float:
    """How near the chances of a taken and of an untaken expert come, relative to them."""
    best = chances.detach().sort(descending=True).values[:, per_token - 1 : per_token + 1]
    return float((best[:, 0] / best[:, -1]).log().min()) if best.shape[1] > 1 else float("inf")


class ReferenceModel(nn.Module):
    balanced = False
    """Whether the tokens of a sequence take the experts in turn."""

    def __init__(self, shape: ModelShape, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.gaps: list[float] = []
        """`router_gap` of every pass through a layer whose router chooses the experts."""
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
        if (bias := self.optional(f"{name}.bias")) is None:
            return F.rms_norm(x, size, weight, 1e-5)
        return F.layer_norm(x, size, weight, bias, 1e-5)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        prefix, shape = f"layers.{layer}.attention", self.shape
        if shape.kv_lora_rank:
            q, k, v = self.latent_heads(x, prefix)
            return self.linear(self.attend(q, k, v, layer), f"{prefix}.out")
        size = shape.head_size
        q, k, v = (self.linear(x, f"{prefix}.{each}") for each in ("query", "key", "value"))
        if shape.qk_norm == "width":
            q, k = self.norm(q, f"{prefix}.query_norm"), self.norm(k, f"{prefix}.key_norm")
        q, k, v = (each.unflatten(-1, (-1, size)) for each in (q, k, v))
        if shape.qk_norm is True:
            q, k = self.norm(q, f"{prefix}.query_norm"), self.norm(k, f"{prefix}.key_norm")
        if shape.family == "llama":
            turned = round(shape.rotary_fraction * size)
            q, k = (
                torch.cat((rotate_half(x[..., :turned], shape.rotary_base), x[..., turned:]), -1)
                for x in (q, k)
            )
        repeat = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
        y = self.attend(q, k, v, layer)
        if shape.attention_output_gate:
            y = y * self.linear(x, f"{prefix}.gate").sigmoid()
        return self.linear(y, f"{prefix}.out")

    def latent_heads(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of latent attention, by the definition of the paper."""
        shape, latent = self.shape, x
        if shape.q_lora_rank:
            latent = self.linear(x, f"{prefix}.query_latent")
            latent = self.norm(latent, f"{prefix}.query_latent_norm")
        q = self.linear(latent, f"{prefix}.query").unflatten(-1, (shape.num_heads, -1))
        below = self.linear(x, f"{prefix}.key_value_latent")
        latent, k_turned = below.split((shape.kv_lora_rank, shape.qk_rope_head_dim), -1)
        latent = self.norm(latent, f"{prefix}.key_value_latent_norm")
        kv = self.linear(latent, f"{prefix}.key_value").unflatten(-1, (shape.num_heads, -1))
        k, v = kv.split((shape.qk_nope_head_dim, shape.v_head_dim), -1)
        q, q_turned = q.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
        base = shape.rotary_base
        k_turned = rotate_half(k_turned[:, :, None], base).expand(-1, -1, shape.num_heads, -1)
        q = torch.cat((q, rotate_half(q_turned, base)), -1)
        return q, torch.cat((k, k_turned), -1), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5
        seq = q.shape[1]
        unseen = torch.ones(seq, seq).triu(1).bool()
        if window := self.shape.window_of(layer):
            unseen |= torch.ones(seq, seq).tril(-window).bool()
        attended = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        return torch.einsum("bnqk,bknd->bqnd", attended, v).flatten(2)

    def experts(self, x: Tensor, prefix: str) -> Tensor:
        """A loop over the experts; each adds its output to that of the tokens that take it."""
        shape, tokens = self.shape, x.flatten(0, 1)
        logits = self.linear(tokens, f"{prefix}.router")
        is_softmax = shape.router_score == "softmax"
        chances = logits.softmax(-1) if is_softmax else logits.sigmoid()
        scored = self.in_groups(chances, logits if is_softmax else chances)
        taken = scored.topk(shape.experts_per_token).indices
        if self.balanced:
            places = torch.arange(shape.seq_length).repeat(len(x))[:, None]
            choices = torch.arange(shape.experts_per_token)
            taken = (places * shape.experts_per_token + choices) % shape.num_experts
        else:
            self.gaps.append(router_gap(scored, shape.experts_per_token))
        total = chances.gather(1, taken).sum(-1)
        if shape.experts_per_token == 1 and not is_softmax:
            total = torch.ones_like(total)
        y = torch.zeros_like(tokens)
        for expert in range(shape.num_experts):
            some = (taken == expert).any(-1)
            own = self.feed_forward(tokens[some], f"{prefix}.experts.{expert}")
            weight = shape.router_scaling_factor * chances[some, expert] / total[some]
            y = y.index_put((some,), y[some] + weight[:, None] * own)
        if shape.shared_expert_ffn_hidden_size:
            shared = self.feed_forward(tokens, f"{prefix}.shared_expert")
            if shape.shared_expert_gate:
                shared = shared * self.linear(tokens, f"{prefix}.shared_expert_gate").sigmoid()
            y = y + shared
        return y.view_as(x)

    def in_groups(self, chances: Tensor, scores: Tensor) -> Tensor:
        """The chances of the experts in the groups with the largest sums of their best scores."""
        groups, number = self.shape.router_groups, self.shape.router_topk_groups
        if not groups:
            return chances
        best = scores.unflatten(-1, (groups, -1)).sort(descending=True).values
        sums = best[..., : max(self.shape.experts_per_token // number, 1)].sum(-1)
        if not self.balanced:
            self.gaps.append(router_gap(sums.exp(), number))
        least = sums.sort(descending=True).values[:, number - 1]
        return chances * (sums >= least[:, None]).repeat_interleave(scores.shape[-1] // groups, -1)

    def feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        if f"{prefix}.router.weight" in self.names:
            return self.experts(x, prefix)
        inner = up = self.linear(x, f"{prefix}.up")
        activation = self.shape.activation_of
        if activation in ("swiglu", "geglu"):
            inner = self.linear(x, f"{prefix}.gate")
        if activation == "swiglu":
            inner = F.silu(inner)
        else:
            inner = (
                inner.relu() ** 2 if activation == "relu2" else F.gelu(inner, approximate="tanh")
            )
        inner = inner * up if f"{prefix}.gate.weight" in self.names else inner
        return self.linear(inner, f"{prefix}.down")

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.weight("embedding.weight")[ids]
        if self.shape.family == "gpt":
            x = x + self.weight("positions.weight")
        for i in range(self.shape.num_layers):
            layer = f"layers.{i}"
            mixer, feed_forward = sublayers_of(self.shape.kind_of_layers[i])
            if mixer:
                normal = self.norm(x, f"{layer}.attention_norm")
                x = x + self.attention(normal, i)
            if feed_forward and not self.shape.parallel_block:
                normal = self.norm(x, f"{layer}.feed_forward_norm")
            if feed_forward:
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
    optimizer = make_optimizer(model.parameters())
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
    assert min(model.gaps, default=1.0) > 1e-6, "rounding could change a router's decision"
    return losses, norms, model.named_weights()
