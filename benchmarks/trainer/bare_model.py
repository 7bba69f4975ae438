"""The bare model: a Llama in plain torch, eager, as one writes it for one device.

It shares the trainer's initial weights and tokens, and nothing else. Shapes: B sequences,
S positions, H hidden, N query and K key heads, D head size, V vocabulary, T = B S tokens,
M micro-batches.
"""

# ruff: noqa: N803, N806, N812, N815 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.batches import Batch
from layout_tuner.workers.trainer.model.parameters import ParameterPart, initialise
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings

MODEL: Final = ModelShape(
    name="bench-trainer",
    family="llama",
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_heads=8,
    num_kv_heads=8,
    seq_length=256,
    vocab_size=8192,
    tied_embeddings=False,
)
SEED: Final = 0
OPTIMIZER: Final = OptimizerSettings(learning_rate=1e-4)
"""A rate without warm-up at which the losses of both precisions stay together."""


MixedPrecision = Literal["autocast", "masters"]
"""How a bf16 loop keeps fp32 weights and adds gradients up in fp32: torch's autocast over an fp32
model, or a bf16 model beside an fp32 copy of its weights."""


class BareRMSNorm(nn.Module):
    """As Llama's reference code writes it; on the CPU several times faster than `F.rms_norm`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_BSH: Tensor) -> Tensor:
        if x_BSH.is_cuda:
            return F.rms_norm(x_BSH, self.weight.shape, self.weight, 1e-5)
        x32_BSH = x_BSH.float()
        normal_BSH = x32_BSH * torch.rsqrt(x32_BSH.square().mean(-1, keepdim=True) + 1e-5)
        return normal_BSH.type_as(x_BSH) * self.weight


class BareAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, self.head_size = shape.hidden_size, shape.head_size
        self.grouped = shape.num_heads != shape.num_kv_heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, shape.kv_hidden_size, bias=False)
        self.value = nn.Linear(hidden, shape.kv_hidden_size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(
            F.scaled_dot_product_attention, is_causal=True, enable_gqa=self.grouped
        )

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        # A tensor-parallel rank has fewer heads: -1 stands for those it has.
        heads = (*x_BSH.shape[:2], -1, self.head_size)
        q_BNSD = rotate(self.query(x_BSH).view(heads).transpose(1, 2), cos_SD, sin_SD)
        k_BKSD = rotate(self.key(x_BSH).view(heads).transpose(1, 2), cos_SD, sin_SD)
        v_BKSD = self.value(x_BSH).view(heads).transpose(1, 2)
        y_BNSD = self.attend(q_BNSD, k_BKSD, v_BKSD)
        return self.out(y_BNSD.transpose(1, 2).flatten(2))


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary positions; the pairs are (i, i + D/2), as in Hugging Face's Llama."""
    first, second = x_BNSD.chunk(2, dim=-1)
    turned_BNSD = torch.cat((-second, first), dim=-1)
    return x_BNSD * cos_SD + turned_BNSD * sin_SD


class BareFeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSH)) * self.up(x_BSH))


class BareBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = BareRMSNorm(shape.hidden_size)
        self.attention = BareAttention(shape)
        self.feed_forward_norm = BareRMSNorm(shape.hidden_size)
        self.feed_forward = BareFeedForward(shape)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        return x_BSH + self.feed_forward(self.feed_forward_norm(x_BSH))


class Llama(nn.Module):
    """The whole model, or some of its layers with the ends that belong to them.

    Args:
        layers: indices of the blocks; the first brings the embedding, the last norm and head.
    """

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, shape: ModelShape, layers: range | None = None) -> None:
        super().__init__()
        layers = range(shape.num_layers) if layers is None else layers
        size = (shape.vocab_size, shape.hidden_size)
        self.embedding = nn.Embedding(*size) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): BareBlock(shape) for i in layers})
        is_last = layers.stop == shape.num_layers
        self.final_norm = BareRMSNorm(shape.hidden_size) if is_last else None
        self.head = nn.Linear(*size[::-1], bias=False) if is_last else None
        cos_SD, sin_SD = _rotary_tables(shape)
        self.register_buffer("cos_SD", cos_SD, persistent=False)
        self.register_buffer("sin_SD", sin_SD, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """From tokens (B, S) or hidden states to hidden states or logits (B, S, V)."""
        x_BSH = x if self.embedding is None else self.embedding(x)
        for block in self.layers.values():
            x_BSH = block(x_BSH, self.cos_SD, self.sin_SD)
        if self.final_norm is None or self.head is None:
            return x_BSH
        return self.head(self.final_norm(x_BSH))


def _rotary_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    powers = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    angles = torch.outer(
        torch.arange(shape.seq_length, dtype=torch.float64), shape.rotary_base**-powers
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def make_llama(
    shape: ModelShape, *, seed: int, device: torch.device, layers: range | None = None
) -> Llama:
    """The model in fp32 with the trainer's initial weights of this seed."""
    if shape.family != "llama" or shape.tied_embeddings:
        raise ValueError(f"{shape.name} is no Llama with an untied head: the bare model is")
    with torch.device("meta"):
        model = Llama(shape, layers)
    model.to_empty(device=device)
    for kept, table in zip((model.cos_SD, model.sin_SD), _rotary_tables(shape), strict=True):
        kept.copy_(table)
    residual_std = 0.02 / (2 * shape.num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            part = ParameterPart(
                name=name,
                shape=tuple(parameter.shape),
                shard_dim=None,
                init="ones" if parameter.dim() == 1 else "normal",
                std=residual_std if is_residual else 0.02,
            )
            initialise(parameter, part, seed=seed)
    return model


def mean_cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean over the tokens, in fp32."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


def adamw_options(settings: OptimizerSettings) -> dict[str, Any]:
    """The trainer's settings as torch's fused AdamW wants them."""
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
        "fused": True,
    }


class MasterCopies:
    """fp32 copies of bf16 parameters, and fp32 gradients in which micro-batches add up.

    The copies start from the rounded parameters, as the trainer's and Megatron-LM's do.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(_adds_to(master))

    def copy_back(self) -> None:
        """Brings the bf16 parameters up to date."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.detach().copy_(master)


def _adds_to(master: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


class BareLoop:
    """The plain training loop: forward and backward of each micro-batch, then one fused AdamW."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        precision: Precision,
        seed: int,
        settings: OptimizerSettings,
        mixed: MixedPrecision = "masters",
        device: torch.device | None = None,
        compiled: bool = False,
    ) -> None:
        self.shape, self.device = shape, device or torch.device("cpu")
        self.model = make_llama(shape, seed=seed, device=self.device)
        self.dtype = COMPUTE_DTYPES[precision]
        self.autocasts = precision != "fp32" and mixed == "autocast"
        self.copies: MasterCopies | None = None
        if precision != "fp32" and mixed == "masters":
            self.copies = MasterCopies(self.model.to(self.dtype).parameters())
        trained = self.copies.masters if self.copies else self.model.parameters()
        self.optimizer = torch.optim.AdamW(trained, **adamw_options(settings))
        self.compute_loss = torch.compile(self._loss) if compiled else self._loss

    def _loss(self, ids_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.autocasts):
            return mean_cross_entropy(self.model(ids_BS), targets_BS)

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the mean loss before it."""
        size = (-1, self.shape.seq_length)
        num_microbatches, losses = len(batch.ids_MT), []
        for ids_T, targets_T in zip(batch.ids_MT, batch.targets_MT, strict=True):
            loss = self.compute_loss(ids_T.view(size), targets_T.view(size))
            (loss / num_microbatches).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.copies is not None:
            self.copies.copy_back()
        return torch.stack(losses).double().mean().item()
