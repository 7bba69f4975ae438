"""The model: a rank's pipeline stages of a GPT or a Llama.

The modules are written like single-device code; linear layers, embedding and cross-entropy hold
their groups and communicate.

Shapes: T = B S tokens of a micro-batch, B sequences, S positions, H hidden features (between the
linear layers those of this rank's tensor column), N and K local query and
key heads, M = N + 2 K, D head size, V local rows of the vocabulary, L tokens between the linear
layers: T / tp under sequence parallelism, else T.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layout_tuner.search_spaces.layouts.rank_mesh import coordinates, expert_coordinates
from layout_tuner.search_spaces.layouts.recomputation import layers_by_rank, modules_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.batches import own_chunks
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.attention import (
    HeadSizes,
    attention_window,
    gated,
    rotary_tables,
    rotate,
)
from layout_tuner.workers.trainer.model.backward import Remade, recomputed
from layout_tuner.workers.trainer.model.context_parallel import attention_core
from layout_tuner.workers.trainer.model.divided_norms import DividedNorm, WidthNorm
from layout_tuner.workers.trainer.model.experts import MixtureOfExperts
from layout_tuner.workers.trainer.model.kernels import (
    EAGER,
    LayerNorm,
    QueryKeyNorm,
    RMSNorm,
    activate,
)
from layout_tuner.workers.trainer.model.latent_attention import LatentAttention
from layout_tuner.workers.trainer.model.parameters import (
    Cut,
    ModelParameter,
    ParameterPart,
    declare,
)
from layout_tuner.workers.trainer.model.tensor_parallel import (
    ColumnParallel,
    RowParallel,
    whole_features,
)
from layout_tuner.workers.trainer.model.vocabulary import Embedding, vocab_cross_entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBuilder:
    """Declares the layers of one rank: the names of their parameters, and how tp divides them."""

    shape: ModelShape
    mesh: Mesh

    def declare(self, *parts: ParameterPart, counted: bool = True) -> ModelParameter:
        place, layout = self.mesh.place, self.mesh.layout
        cut = Cut(place.tp_rank, layout.tp, place.column_rank, layout.tp_columns)
        return declare(*parts, cut=cut, counted=counted)

    def column(
        self, prefix: str, outputs: dict[str, int], *, has_bias: bool, inputs: int = 0
    ) -> ColumnParallel:
        """A fused column-parallel layer of several named projections.

        Their input is the residual stream, unless `inputs` says another width.
        """
        inputs = inputs or self.shape.hidden_size
        weight = self.declare(
            *(
                _normal(f"{prefix}.{name}.weight", size, inputs, dim=0, column_dim=1)
                for name, size in outputs.items()
            )
        )
        bias = None
        if has_bias:
            bias = self.declare(
                *(_zeros(f"{prefix}.{name}.bias", size, dim=0) for name, size in outputs.items())
            )
        return ColumnParallel(weight, bias, self.mesh.tp_group, **self.divided)

    def whole(self, prefix: str, outputs: dict[str, int]) -> ColumnParallel:
        """Fused projections that each tp rank has whole, and computes of its own tokens."""
        hidden = self.shape.hidden_size
        parts = [
            _normal(f"{prefix}.{name}.weight", n, hidden, dim=None) for name, n in outputs.items()
        ]
        return ColumnParallel(self.declare(*parts), None, None)

    @property
    def divided(self) -> dict[str, Any]:
        """How linear layers are divided over other ranks than those of tp."""
        return {
            "columns": self.mesh.column_group,
            "cuts_tokens": self.mesh.cuts_tokens,
            "overlaps": self.mesh.options.overlap_all_reduce,
        }

    @property
    def row_std(self) -> float:
        """Standard deviation of initial weights of projections back to the residual stream."""
        return 0.02 / (2 * self.shape.num_layers) ** 0.5  # type: ignore[no-any-return]

    def row(self, prefix: str, inputs: int, *, has_bias: bool) -> RowParallel:
        """A row-parallel projection back to the residual stream.

        The standard deviation of its initial weights is divided by sqrt(2 num_layers), as in GPT-2.
        """
        outputs, std = self.shape.hidden_size, self.row_std
        weight = self.declare(
            _normal(f"{prefix}.weight", outputs, inputs, dim=1, column_dim=0, std=std)
        )
        bias = self._of_features(f"{prefix}.bias", "zeros") if has_bias else None
        return RowParallel(weight, bias, self.mesh.tp_group, **self.divided)

    def norm(self, prefix: str) -> LayerNorm | RMSNorm | DividedNorm:
        weight, columns = self._of_features(f"{prefix}.weight", "ones"), self.mesh.column_group
        has_bias = self.shape.has_layer_norms
        bias = self._of_features(f"{prefix}.bias", "zeros") if has_bias else None
        if columns is not None:
            return DividedNorm(weight, bias, columns)
        return RMSNorm(weight) if bias is None else LayerNorm(weight, bias)

    def _of_features(self, name: str, init: Literal["zeros", "ones"]) -> ModelParameter:
        """A number for each feature of the residual stream."""
        size = (self.shape.hidden_size,)
        part = ParameterPart(name=name, shape=size, shard_dim=None, column_dim=0, init=init)
        return self.declare(part)

    def whole_norm(self, name: str, size: int) -> ModelParameter:
        """The weight of a norm that each tp rank has whole, and computes of its own tokens."""
        part = ParameterPart(name=f"{name}.weight", shape=(size,), shard_dim=None, init="ones")
        return self.declare(part)

    def query_key_norm(self, prefix: str) -> QueryKeyNorm | WidthNorm:
        """Norms of this rank's heads: of each, or of all heads of all ranks together.

        In the first case its part of their weights' gradient is that of its heads.
        """
        shape, tp, group = self.shape, self.mesh.layout.tp, self.mesh.tp_group
        names = [f"{prefix}.{name}_norm.weight" for name in ("query", "key")]
        if shape.qk_norm != "width":
            weights = (self.declare(_whole(name, shape.head_size, init="ones")) for name in names)
            heads, kv_heads = shape.num_query_heads // tp, shape.num_key_heads // tp
            return QueryKeyNorm(*weights, num_heads=heads, num_kv_heads=kv_heads)
        sizes = shape.query_size, shape.kv_hidden_size
        weights = (
            self.declare(ParameterPart(name=name, shape=(size,), shard_dim=0, init="ones"))
            for name, size in zip(names, sizes, strict=True)
        )
        return WidthNorm(
            *(RMSNorm(w) if group is None else DividedNorm(w, None, group) for w in weights)
        )

    def experts(self, prefix: str) -> MixtureOfExperts:
        """The router, and the experts of this rank, each a logical parameter for each matrix."""
        shape, mesh = self.shape, self.mesh
        place = expert_coordinates(mesh.rank, mesh.layout)
        width, hidden = shape.moe_ffn_hidden_size, shape.hidden_size
        each = shape.num_experts // mesh.layout.ep
        names = [f"{prefix}.experts.{place.ep_rank * each + index}" for index in range(each)]
        up = [
            _normal(f"{name}.{half}.weight", width, hidden, dim=0)
            for name in names
            for half in _ups(shape)
        ]
        down = [_normal(f"{n}.down.weight", hidden, width, dim=1, std=self.row_std) for n in names]
        cut = Cut(place.etp_rank, mesh.layout.etp)
        shared, others = shape.shared_expert_ffn_hidden_size, dict[str, Any]()
        if shape.biases_of == "all":
            ups = [_zeros(part.name.replace("weight", "bias"), width, dim=0) for part in up]
            downs = [_zeros(f"{name}.down.bias", hidden, dim=None) for name in names]
            router = _whole(f"{prefix}.router.bias", shape.num_experts, init="zeros")
            others = {
                "router_bias": self.declare(router),
                "up_bias": declare(*ups, cut=cut, of_experts=True),
                "down_bias": declare(*downs, cut=cut, of_experts=True),
            }
        if shape.shared_expert_gate:
            gate = _whole(f"{prefix}.shared_expert_gate.weight", 1, hidden)
            others["shared_gate"] = ColumnParallel(self.declare(gate), None, None)
        return MixtureOfExperts(
            self.declare(_whole(f"{prefix}.router.weight", shape.num_experts, hidden)),
            declare(*up, cut=cut, of_experts=True),
            declare(*down, cut=cut, of_experts=True),
            shape=shape,
            positions_T=self.routed_positions(),
            ep_group=mesh.ep_group,
            etp_group=mesh.etp_group,
            shared=FeedForward(self, f"{prefix}.shared_expert", shared) if shared else None,
            **others,
        )

    def routed_positions(self) -> Tensor:
        """The position in its sequence of each token that this rank's routers choose experts of.

        They are those of the ranks of its etp group, one after the other.
        """
        layout, seq_length = self.mesh.layout, self.shape.seq_length
        ranks = [self.mesh.rank] if self.mesh.etp_group is None else self.mesh.etp_group.ranks
        positions = []
        for place in (coordinates(rank, layout) for rank in ranks):
            own_S = own_chunks(torch.arange(seq_length), layout.cp, place.cp_rank)
            tokens_T = own_S.repeat(layout.micro_batch_size)
            positions.append(tokens_T.chunk(layout.tp)[place.tp_rank])
        return torch.cat(positions)

    def embedding(self) -> Embedding:
        shape, positions = self.shape, None
        if shape.family == "gpt":
            positions = self.declare(
                _normal(
                    "positions.weight", shape.seq_length, shape.hidden_size, dim=None, column_dim=1
                )
            )
        return Embedding(self.vocabulary("embedding.weight"), positions, self.mesh)

    def vocabulary(self, name: str, *, counted: bool = True) -> ModelParameter:
        shape = self.shape
        part = _normal(name, shape.vocab_size, shape.hidden_size, dim=0, column_dim=0)
        return self.declare(part, counted=counted)


def _normal(
    name: str, *shape: int, dim: int | None, column_dim: int | None = None, std: float = 0.02
) -> ParameterPart:
    return ParameterPart(
        name=name, shape=shape, shard_dim=dim, column_dim=column_dim, init="normal", std=std
    )


def _whole(
    name: str, *sizes: int, init: Literal["normal", "zeros", "ones"] = "normal"
) -> ParameterPart:
    """A parameter that every tp rank holds, each with a part of its gradient."""
    return ParameterPart(name=name, shape=sizes, shard_dim=None, init=init, partial_gradient=True)


def _zeros(name: str, size: int, *, dim: int | None) -> ParameterPart:
    return ParameterPart(name=name, shape=(size,), shard_dim=dim, init="zeros")


def _ups(shape: ModelShape) -> tuple[str, ...]:
    """The projections that lead into a feed-forward."""
    return ("gate", "up") if shape.is_gated else ("up",)


class Attention(nn.Module):
    """Causal attention over the heads of this rank.

    Forward and backward: one all-reduce over tp each, and over tensor columns; under sequence
    parallelism one all-gather and one reduce-scatter over tp each. Over cp it communicates as
    `context_parallel` says.
    """

    def __init__(
        self,
        build: StageBuilder,
        prefix: str,
        window: int | None = None,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        shape = build.shape
        outputs = {"query": shape.query_size, "key": shape.kv_hidden_size}
        outputs["value"] = shape.kv_hidden_size
        if shape.attention_output_gate:
            outputs["gate"] = shape.query_size
        self.has_gate, biases = shape.attention_output_gate, shape.biases_of
        self.qkv = build.column(prefix, outputs, has_bias=biases != "none")
        self.norm = build.query_key_norm(prefix) if shape.qk_norm else None
        has_bias = biases in ("attention", "all")
        self.out = build.row(f"{prefix}.out", shape.query_size, has_bias=has_bias)
        self.seq_length = shape.seq_length // build.mesh.layout.cp
        self.heads = HeadSizes.of(shape, build.mesh.layout.tp)
        self.recomputes = recomputes
        self.attend = attention_core(build.mesh, recomputes=recomputes)
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.window = window

    def forward(self, x_LH: Tensor, residual_LH: Tensor, remade: Remade | None = None) -> Tensor:
        qkv_TM = self.qkv(x_LH, remade)
        if self.norm is not None:
            qkv_TM = self.norm(qkv_TM)
        if self.rotary is not None:
            num_rotated = self.heads.num_queries + self.heads.num_keys
            qkv_TM = rotate(qkv_TM, *self.rotary, num_rotated, self.heads.key_size)
        gate_TI = None
        if self.has_gate:
            size = sum(self.heads.widths)
            qkv_TM, gate_TI = torch.split(qkv_TM, [size, qkv_TM.shape[1] - size], dim=1)
        qkv_BSM = qkv_TM.view(-1, self.seq_length, qkv_TM.shape[1])
        y_BSND = self.attend(qkv_BSM, self.heads)
        y_TI = y_BSND.reshape(len(qkv_TM), -1)
        y_TI = y_TI if gate_TI is None else gated(y_TI, gate_TI)
        return self.out(y_TI, residual_LH)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with the model's activation between them.

    Communicates over tp as `Attention` does. With `recomputes` all inside is remade: the first
    layer runs again in the backward pass, and gathers again, the second does not.
    """

    def __init__(
        self, build: StageBuilder, prefix: str, size: int, *, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.activation, has_bias = build.shape.activation_of, build.shape.biases_of == "all"
        outputs = dict.fromkeys(_ups(build.shape), size)
        self.up = build.column(prefix, outputs, has_bias=has_bias)
        self.down = build.row(f"{prefix}.down", size, has_bias=has_bias)
        self.kernels, self.recomputes = EAGER, recomputes

    def forward(
        self, x_LH: Tensor, residual_LH: Tensor | None, remade: Remade | None = None
    ) -> Tensor:
        if not self.recomputes:
            return self.down(self._inside(x_LH, remade), residual_LH)  # type: ignore[no-any-return]
        inside = Remade(self._inside, remade)
        return self.down(inside(x_LH), residual_LH, inside)  # type: ignore[no-any-return]

    def _inside(self, x_LH: Tensor, remade: Remade | None = None) -> Tensor:
        return activate(self.up(x_LH, remade), self.activation, self.kernels)


class Block(nn.Module):
    """One layer, by its index in the model: attention, a feed-forward, or both.

    Forward and backward: an all-reduce over tp of each of these; under sequence parallelism an
    all-gather and a reduce-scatter over tp each, also where both take the same normed input (a
    parallel block). `recomputes` names what the backward pass makes again; the activation of
    experts it always does.
    """

    attention: Attention | LatentAttention | None
    feed_forward: FeedForward | MixtureOfExperts | None

    def __init__(
        self, build: StageBuilder, index: int, recomputes: Container[str] = frozenset()
    ) -> None:
        super().__init__()
        self.attention = self.feed_forward = None
        shape, prefix = build.shape.of_kind(build.shape.kind_of_layers[index]), f"layers.{index}"
        build = replace(build, shape=shape)
        if shape.mixer is not None:
            self.attention_norm = build.norm(f"{prefix}.attention_norm")
            own = f"{prefix}.attention", shape.window_of(0)
            if shape.kv_lora_rank:
                self.attention = LatentAttention(build, *own, recomputes)
            else:
                self.attention = Attention(build, *own, recomputes="core_attention" in recomputes)
        self.feed_forward_norm = None
        if shape.feed_forward is not None and not shape.parallel_block:
            self.feed_forward_norm = build.norm(f"{prefix}.feed_forward_norm")
        prefix = f"{prefix}.feed_forward"
        if shape.feed_forward == "experts":
            self.feed_forward = build.experts(prefix)
        elif shape.feed_forward == "dense":
            self.feed_forward = FeedForward(
                build, prefix, shape.ffn_hidden_size, recomputes="mlp" in recomputes
            )
        self._remakes_norms = "layernorm" in recomputes
        self._recomputes_all = "full" in recomputes

    def forward(self, x_LH: Tensor) -> Tensor:
        return recomputed(x_LH, self._compute) if self._recomputes_all else self._compute(x_LH)

    def _compute(self, x_LH: Tensor) -> Tensor:
        if self.attention is not None:
            normal_LH, remade = self._normed(self.attention_norm, x_LH)
            x_LH = self.attention(normal_LH, x_LH, remade)
        if self.feed_forward is not None:
            if self.feed_forward_norm is not None:
                normal_LH, remade = self._normed(self.feed_forward_norm, x_LH)
            x_LH = self.feed_forward(normal_LH, x_LH, remade)
        return x_LH

    def _normed(self, norm: nn.Module, x_LH: Tensor) -> tuple[Tensor, Remade | None]:
        remade = Remade(norm) if self._remakes_norms else None
        return (remade or norm)(x_LH), remade


class Stage(nn.Module):
    """The layers of one pipeline stage.

    The first stage also has the embedding, and the last one the final norm and the head. If these
    count as a layer (`Layout.pipeline_split`), the stage may have no other.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, *, chunk: int = 0) -> None:
        super().__init__()
        build = StageBuilder(shape=shape, mesh=mesh)
        num_stages = mesh.layout.pp * mesh.layout.vpp
        index = chunk * mesh.layout.pp + mesh.place.pp_rank
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.embedding = build.embedding() if self.is_first else None
        layers = mesh.layout.layers_of_stage(index, shape.num_layers)
        self.blocks = nn.ModuleList(
            Block(build, layer, _recomputed(mesh, number)) for number, layer in enumerate(layers)
        )
        self.mesh, self.tied = mesh, shape.tied_embeddings
        self.final_norm = build.norm("final_norm") if self.is_last else None
        self.head = self._head(build) if self.is_last else None

    def _head(self, build: StageBuilder) -> ColumnParallel:
        if not build.shape.tied_embeddings:
            weight = build.vocabulary("head.weight")
        elif self.embedding is not None:
            weight = self.embedding.weight
        else:
            weight = build.vocabulary("embedding.weight", counted=False)
        # Its input has whole features, of which the columns have no part (`whole_features`).
        return ColumnParallel(
            weight, None, build.mesh.tp_group, **build.divided | {"columns": None}
        )

    @property
    def tied_weight(self) -> ModelParameter | None:
        """The embedding or head weight of this stage, if first and last stage share it."""
        end = self.embedding or self.head
        return end.weight if self.tied and end is not None else None

    @property
    def layers(self) -> list[tuple[nn.Module, ...]]:
        """The modules of each layer, in forward order: embedding, blocks, final norm and head."""
        layers: list[tuple[nn.Module, ...]] = [(block,) for block in self.blocks]
        if self.embedding is not None:
            layers.insert(0, (self.embedding,))
        if self.final_norm is not None and self.head is not None:
            layers.append((self.final_norm, self.head))
        return layers

    def put_off_gradients(self) -> list[Callable[[], None]]:
        """Lets all gradients but the embedding's wait in the list that is returned."""
        waiting: list[Callable[[], None]] = []
        for layer in self.layers:
            for module in layer:
                for parameter in () if module is self.embedding else module.parameters():
                    assert isinstance(parameter, ModelParameter)
                    parameter.put_off = waiting
        return waiting

    def forward(self, x: Tensor, targets_T: Tensor) -> Tensor:
        """From token ids or the previous stage's output to this stage's output.

        The last stage returns the micro-batch's mean loss.
        """
        x_LH = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x_LH = block(x_LH)
        if self.head is None or self.final_norm is None:
            return x_LH
        x_LH = self.final_norm(x_LH)
        if self.mesh.column_group is not None:
            x_LH = whole_features(x_LH, self.mesh.column_group)
        logits_TV = self.head(x_LH)
        first_row = self.head.weight.shape[0] * self.mesh.vocabulary_rank
        return vocab_cross_entropy(logits_TV, targets_T, first_row, self.mesh.vocabulary_group)


def _recomputed(mesh: Mesh, number: int) -> frozenset[str]:
    """What the backward pass recomputes of a stage's layer, by its number from 0."""
    layout, pp_rank = mesh.layout, mesh.place.pp_rank
    counts = layers_by_rank(layout.recompute_layers)
    if counts and number >= counts[pp_rank if len(counts) > 1 else 0]:
        return frozenset()
    return frozenset({"full"} if layout.recompute == "full" else modules_of(layout.recompute))


class RankModel(nn.Module):
    """One rank's part of the model: vpp stages, each pp stages after the one before."""

    def __init__(self, shape: ModelShape, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.window_SS: Tensor | None = None
        self.chunks = nn.ModuleList(
            Stage(shape, mesh, chunk=chunk) for chunk in range(mesh.layout.vpp)
        )

    @property
    def stages(self) -> list[Stage]:
        """The stages, first to last. Backward passes reach them in reverse order."""
        return [chunk for chunk in self.chunks if isinstance(chunk, Stage)]

    @property
    def layers(self) -> list[tuple[nn.Module, ...]]:
        """The modules of each layer of all stages, in forward order."""
        return [layer for stage in self.stages for layer in stage.layers]

    @property
    def tied_weight(self) -> ModelParameter | None:
        """The embedding or head weight of this rank, if first and last stage share it."""
        weights = (stage.tied_weight for stage in self.stages)
        return next((weight for weight in weights if weight is not None), None)

    def prepare_tables(
        self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Sets the rotary tables of every attention, if the family has them, and windows.

        Rotary tables hold the rank's positions of a sequence.
        """
        if shape.attention_window is not None:
            self.window_SS = attention_window(shape.seq_length, shape.attention_window, device)
            for attention in self.attentions:
                if attention.window is not None:
                    attention.attend = attention_core(
                        self.mesh, self.window_SS, recomputes=attention.recomputes
                    )
        if shape.family == "llama" and shape.rotary_size:
            whole = rotary_tables(
                shape.seq_length,
                shape.rotary_size,
                base=shape.rotary_base,
                dtype=dtype,
                device=device,
            )
            cosines, sines = (self.mesh.own_positions(table) for table in whole)
            for attention in self.attentions:
                attention.rotary = cosines, sines

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        return [each for each in self.modules() if isinstance(each, Attention | LatentAttention)]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The tables that attentions of this rank share: rotary positions, and the window."""
        windows = () if self.window_SS is None else (self.window_SS,)
        rotary = next((each.rotary or () for each in self.attentions), ())
        return (*rotary, *windows)

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
