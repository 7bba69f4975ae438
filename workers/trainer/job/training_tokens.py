"""Samples from a token file that is mapped into memory, in a seeded order. Needs no torch.

S is the sequence length. Sample i of the file is the S + 1 tokens from token i S on. Neighbouring
samples share one token, so that each token but the first is a target once.

The order is computed place by place, without a list of all samples. A Feistel network over the next
power of four permutes more numbers than there are samples; a number that is too large is permuted
again until it is small enough (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.documents.reading import shown, whole_number_problem, why_unreadable
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.errors import TrainingTokensInvalidError

DTYPES: Final = ("uint16", "uint32", "int32", "int64")
"""Types of token ids, little-endian."""

_LONGEST_HEADER: Final = 1 << 30
_LLM_C_HEADERS: Final = (20240520, 20240801)
"""First words of llm.c's token files, whose header has 256 words."""

_ROUNDS: Final = 8
"""Rounds of the Feistel network. With an ideal round function four rounds are pseudorandom (Luby
and Rackoff 1988)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFileSettings:
    """A token file and how to read it; TrainingTokensInvalidError for a field out of range."""

    tokens: str
    """The file's path."""
    dtype: str | None = None
    """Type of a token id; None: the type in the header of a .npy file."""
    skip_bytes: int = 0
    """Length of a header before the first token."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, str) or not self.tokens or "\0" in self.tokens:
            raise TrainingTokensInvalidError(f"tokens={shown(self.tokens)} is not a file's path")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise TrainingTokensInvalidError(
                f"dtype={shown(self.dtype)} is not one of {', '.join(DTYPES)}"
            )
        if problem := whole_number_problem(self.skip_bytes, low=0, high=_LONGEST_HEADER):
            raise TrainingTokensInvalidError(f"skip_bytes={problem}")
        if self.is_npy and self.skip_bytes:
            raise TrainingTokensInvalidError(
                f"skip_bytes={self.skip_bytes} is for flat files; {self.tokens} says where its "
                "tokens begin"
            )
        if self.dtype is None and not self.is_npy:
            raise TrainingTokensInvalidError(
                f"dtype is missing: {self.tokens} does not say what its tokens are; "
                f"give one of {', '.join(DTYPES)}"
            )

    @property
    def is_npy(self) -> bool:
        return self.tokens.endswith(".npy")


class TokenFile:
    """Samples of a token file in a seeded order, which differs in every epoch.

    The samples of a step depend on the file, the seed, and the number of samples before it:
    `first_sample` of them were used before `first_step`, at which the job starts or resumes.

    Raises:
        TrainingTokensInvalidError: the file can't be read, or holds less than one sample.
    """

    def __init__(
        self,
        settings: TokenFileSettings,
        shape: ModelShape,
        *,
        seed: int,
        global_batch_size: int,
        first_step: int = 0,
        first_sample: int = 0,
    ) -> None:
        self.path = settings.tokens
        self.tokens = _mapped(settings)
        self._seq_length, self._vocab_size, self._seed = shape.seq_length, shape.vocab_size, seed
        self._global_batch_size = global_batch_size
        self._first_step, self._first_sample = first_step, first_sample
        if len(self.tokens) <= shape.seq_length:
            raise TrainingTokensInvalidError(
                f"{self.path} holds {len(self.tokens)} tokens, and one sample takes "
                f"seq_length + 1 = {shape.seq_length + 1}; name a longer file, or check its dtype "
                f"({self.tokens.dtype}) and skip_bytes ({settings.skip_bytes})"
            )
        self.num_samples = (len(self.tokens) - 1) // shape.seq_length

    def samples(self, step: int, indices: range) -> NDArray[np.int64]:
        """Samples of a step's global batch by their index in it: seq_length + 1 tokens each.

        Raises:
            TrainingTokensInvalidError: a token's id is not below the model's vocab_size.
        """
        before = self._first_sample + (step - self._first_step) * self._global_batch_size
        starts = self._order(before + np.arange(indices.start, indices.stop)) * self._seq_length
        positions = starts[:, None] + np.arange(self._seq_length + 1)
        ids: NDArray[np.int64] = self.tokens[positions].astype(np.int64)
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            self._refuse(int(positions[outside][0]), int(ids[outside][0]))
        return ids

    def describe(self) -> dict[str, Any]:
        """Number and type of the tokens, by which a checkpoint recognises the file."""
        return {"number": len(self.tokens), "dtype": self.tokens.dtype.name}

    def _order(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """The file's sample for each position in the order of all epochs."""
        epochs, places = np.divmod(drawn, self.num_samples)
        order = np.empty_like(drawn)
        for epoch in np.unique(epochs):
            key = f"{self._seed}/{epoch}"
            chosen = epochs == epoch
            order[chosen] = shuffled(places[chosen], size=self.num_samples, key=key)
        return order

    def _refuse(self, position: int, token: int) -> None:
        raise TrainingTokensInvalidError(
            f"token {position} of {self.path} is {token}, outside the model's vocabulary of "
            f"vocab_size={self._vocab_size}; train a model with a larger one, or check the file's "
            f"dtype ({self.tokens.dtype})"
        )


def _mapped(settings: TokenFileSettings) -> NDArray[Any]:
    path = Path(settings.tokens)
    try:
        if settings.is_npy:
            return _mapped_npy(path, settings.dtype)
        return _mapped_flat(path, np.dtype(settings.dtype).newbyteorder("<"), settings.skip_bytes)
    except (OSError, ValueError, EOFError) as error:
        raise TrainingTokensInvalidError(
            f"the token file {path} can't be read: {why_unreadable(error)}"
        ) from error


def _mapped_npy(path: Path, dtype: str | None) -> NDArray[Any]:
    tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
        raise TrainingTokensInvalidError(
            f"{path} holds an array of {tokens.dtype} and shape {tokens.shape}; tokens are one "
            f"dimension of {', '.join(DTYPES)}"
        )
    if dtype is not None and dtype != tokens.dtype.name:
        raise TrainingTokensInvalidError(
            f"dtype={dtype!r}, and {path} holds {tokens.dtype.name}; leave dtype out"
        )
    return tokens


def _mapped_flat(path: Path, dtype: np.dtype[Any], skip_bytes: int) -> NDArray[Any]:
    with path.open("rb") as stream:
        first_word = int.from_bytes(stream.read(4), "little")
        num_bytes = stream.seek(0, 2) - skip_bytes
    if first_word in _LLM_C_HEADERS and skip_bytes == 0:
        raise TrainingTokensInvalidError(
            f"{path} begins with the header of llm.c's token files; say skip_bytes=1024"
        )
    if num_bytes < dtype.itemsize:  # numpy maps no empty file
        return np.empty(0, dtype)
    if num_bytes % dtype.itemsize:
        raise TrainingTokensInvalidError(
            f"{path} holds {num_bytes} bytes after skip_bytes={skip_bytes}, which are no whole "
            f"number of {dtype.name} tokens ({dtype.itemsize} bytes each); is that its dtype?"
        )
    return np.memmap(path, dtype, mode="r", offset=skip_bytes)


def shuffled(places: NDArray[np.int64], *, size: int, key: str) -> NDArray[np.int64]:
    """The numbers at these places of a permutation of 0 to size - 1.

    The permutation depends on `key` and `size` only, on every machine and numpy version.
    """
    half_bits = max(-(-(size - 1).bit_length() // 2), 1)
    keys = [_round_key(key, index) for index in range(_ROUNDS)]
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        found[outside] = _permuted(found[outside], np.uint64(half_bits), keys)
        outside = found >= size
    return found.astype(np.int64)


def _permuted(
    values: NDArray[np.uint64], half_bits: np.uint64, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half_bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The final mixing steps of SplitMix64: an input bit flips about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_key(key: str, index: int) -> np.uint64:
    digest = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))
