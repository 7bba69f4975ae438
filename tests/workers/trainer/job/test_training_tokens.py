"""Tokens of a file and synthetic ones: the same global batch under every layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.batches import SyntheticTokens, cut_batch
from layout_tuner.workers.trainer.errors import TrainingTokensInvalidError, TrainJobInvalidError
from layout_tuner.workers.trainer.job.job import TrainJob, read_job
from layout_tuner.workers.trainer.job.training_tokens import TokenFile, TokenFileSettings, shuffled
from layout_tuner.workers.trainer.train import main
from tests.workers.trainer.cases import make_layout, make_shape

SHAPE = make_shape(seq_length=8, vocab_size=1000)


def write_tokens(folder: Path, num_tokens: int, dtype: str = "uint16", header: bytes = b"") -> str:
    """A file whose token number i is i: a sample then says where it comes from."""
    path = folder / "tokens.bin"
    path.write_bytes(header + np.arange(num_tokens, dtype=np.dtype(dtype)).tobytes())
    return str(path)


def open_file(settings: TokenFileSettings, *, global_batch_size: int = 4, **more: Any) -> TokenFile:
    return TokenFile(settings, SHAPE, **{"seed": 0, "global_batch_size": global_batch_size, **more})


def opened(folder: Path, num_tokens: int = 401, **more: Any) -> TokenFile:
    path = write_tokens(folder, num_tokens)
    return open_file(TokenFileSettings(tokens=path, dtype="uint16"), **more)


def starts(file: TokenFile, steps: range) -> list[int]:
    """Where the samples of these steps begin, in units of samples."""
    size = file._global_batch_size
    rows = np.concatenate([file.samples(step, range(size)) for step in steps])
    return [int(row[0]) // SHAPE.seq_length for row in rows]


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_a_shuffled_order_has_everything_once(size: int) -> None:
    order = shuffled(np.arange(size), size=size, key="a")
    assert sorted(order) == list(range(size))


def test_a_shuffled_order_is_mixed_and_is_another_with_every_key() -> None:
    order, other = (shuffled(np.arange(1000), size=1000, key=key) for key in ("0/0", "0/1"))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.1
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.1


def test_the_order_is_the_same_for_ever() -> None:
    """Else a job that is resumed with a newer version would train on some samples twice."""
    assert shuffled(np.arange(8), size=1000, key="0/0").tolist() == [
        63, 340, 609, 242, 645, 673, 668, 938,
    ]  # fmt: skip


def test_a_place_of_an_order_of_any_length_costs_no_list() -> None:
    places = np.array([0, 1 << 40, (1 << 50) - 1])
    assert (shuffled(places, size=1 << 50, key="a") < 1 << 50).all()


def test_a_sample_is_consecutive_tokens_and_every_epoch_takes_each_once(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.num_samples == 50
    rows = file.samples(0, range(4))
    assert (np.diff(rows) == 1).all()
    assert (rows[:, 0] % SHAPE.seq_length == 0).all()
    drawn = starts(file, range(25))  # 100 samples: two epochs, whose border lies within a step
    assert sorted(drawn[:50]) == sorted(drawn[50:]) == list(range(50))
    assert drawn[:50] != drawn[50:]
    assert drawn[:50] != list(range(50))


def test_a_batch_larger_than_the_file_takes_several_epochs(tmp_path: Path) -> None:
    file = opened(tmp_path, 17, global_batch_size=6)
    assert sorted(starts(file, range(1))) == [0, 0, 0, 1, 1, 1]


def test_seeds_order_samples_differently(tmp_path: Path) -> None:
    assert starts(opened(tmp_path), range(5)) == starts(opened(tmp_path), range(5))
    assert starts(opened(tmp_path), range(5)) != starts(opened(tmp_path, seed=1), range(5))


def test_a_file_goes_on_where_it_stood_with_another_batch_size_too(tmp_path: Path) -> None:
    whole = starts(opened(tmp_path), range(20))
    resumed = opened(tmp_path, first_step=7, first_sample=28)
    assert starts(resumed, range(7, 20)) == whole[28:]
    larger = opened(tmp_path, global_batch_size=8, first_step=7, first_sample=28)
    assert starts(larger, range(7, 13)) == whole[28:76]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_tokens_may_have_several_types_and_a_header(tmp_path: Path, dtype: str) -> None:
    path = write_tokens(tmp_path, 41, dtype, header=b"\xff" * 10)
    file = open_file(TokenFileSettings(tokens=path, dtype=dtype, skip_bytes=10))
    assert file.num_samples == 5
    assert sorted(file.samples(0, range(5))[:, 0]) == [0, 8, 16, 24, 32]


def test_a_npy_file_says_its_type_itself(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(41, dtype=np.uint32))
    assert open_file(TokenFileSettings(tokens=str(path))).num_samples == 5
    with pytest.raises(TrainingTokensInvalidError, match=r"dtype='uint16', and .* holds uint32"):
        open_file(TokenFileSettings(tokens=str(path), dtype="uint16"))
    np.save(path, np.ones((2, 30)))
    with pytest.raises(TrainingTokensInvalidError, match=r"of float64 and shape \(2, 30\)"):
        open_file(TokenFileSettings(tokens=str(path)))
    path.write_bytes(b"no array")
    with pytest.raises(TrainingTokensInvalidError, match=r"tokens.npy can't be read"):
        open_file(TokenFileSettings(tokens=str(path)))


def test_an_id_outside_the_vocabulary_is_named_with_its_position(tmp_path: Path) -> None:
    ids = np.zeros(401, dtype=np.int32)
    for position, token in ((123, 1000), (77, -3)):
        ids[:] = 0
        ids[position] = token
        (tmp_path / "tokens.bin").write_bytes(ids.tobytes())
        settings = TokenFileSettings(tokens=str(tmp_path / "tokens.bin"), dtype="int32")
        sentence = rf"token {position} of .*tokens.bin is {token}, outside .* vocab_size=1000"
        with pytest.raises(TrainingTokensInvalidError, match=sentence):
            open_file(settings, global_batch_size=50).samples(0, range(50))


@pytest.mark.parametrize(
    ("content", "fields", "sentence"),
    [
        (b"", {}, r"holds 0 tokens, and one sample takes seq_length \+ 1 = 9"),
        (bytes(16), {}, "holds 8 tokens, and one sample takes"),
        (bytes(18), {"skip_bytes": 40}, "holds 0 tokens, and one sample takes"),
        (bytes(33), {}, "holds 33 bytes after skip_bytes=0, which are no whole number of uint16"),
        (bytes(34), {"dtype": "uint32"}, r"no whole number of uint32 tokens \(4 bytes each\)"),
        ((20240520).to_bytes(4, "little") + bytes(2000), {}, "say skip_bytes=1024"),
    ],
)
def test_a_file_that_holds_no_samples_is_refused(
    tmp_path: Path, content: bytes, fields: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(TrainingTokensInvalidError, match=sentence):
        open_file(TokenFileSettings(**{"tokens": str(path), "dtype": "uint16", **fields}))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("tokens.bin", "='tokens.bin' is not an object"),
        ({"dtype": "uint16"}, "tokens, the path of the file, is missing"),
        ({"tokens": "t.bin"}, "dtype is missing: .*t.bin does not say what its tokens are"),
        ({"tokens": "t.bin", "dtype": "float32"}, "dtype='float32' is not one of uint16, uint32"),
        ({"tokens": "t.bin", "dtype": ["uint16"]}, "dtype=.* is not one of uint16"),
        ({"tokens": 3, "dtype": "uint16"}, "tokens=3 is not a file's path"),
        ({"tokens": "a\0b", "dtype": "uint16"}, "is not a file's path"),
        ({"tokens": "t.bin", "dtype": "uint16", "skip_bytes": -1}, "skip_bytes=-1"),
        ({"tokens": "t.npy", "skip_bytes": 8}, "skip_bytes=8 is for flat files"),
        ({"token": "t.bin"}, "unknown field 'token'; the fields are tokens, dtype, skip_bytes"),
    ],
)
def test_a_malformed_data_field_is_named(data: Any, sentence: str) -> None:
    job = TrainJob(model=SHAPE, layout=make_layout())
    with pytest.raises(TrainJobInvalidError, match=f"the job's data.*{sentence}"):
        TrainJob.from_mapping({**job.to_mapping(), "data": data})


def write_job(folder: Path, **changes: Any) -> Path:
    job = TrainJob(model=SHAPE, layout=make_layout(), steps=3)
    path = folder / "job.json"
    path.write_text(json.dumps({**job.to_mapping(), **changes}))
    return path


def test_paths_are_taken_from_the_job_file_s_folder(tmp_path: Path) -> None:
    job = read_job(write_job(tmp_path, data={"tokens": "../t.bin", "dtype": "uint16"}))
    assert job.data.tokens == f"{tmp_path}/../t.bin"
    absolute = read_job(write_job(tmp_path, data={"tokens": "/d/t.bin", "dtype": "uint16"}))
    assert absolute.data.tokens == "/d/t.bin"


def test_a_job_whose_tokens_are_missing_is_refused_before_any_rank_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path, data={"tokens": "none.bin", "dtype": "uint16"})
    assert main(["--config", str(path)]) == 2
    assert f"the token file {tmp_path}/none.bin can't be read" in capsys.readouterr().err


SYNTHETIC = make_shape(seq_length=64, vocab_size=128)


def global_batch(layout: Layout, *, seed: int = 0, step: int = 0) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for dp_rank in range(layout.dp):
        source = SyntheticTokens(shape=SYNTHETIC, seed=seed)
        batch = cut_batch(source, layout, step=step, dp_rank=dp_rank)
        length = layout.micro_batch_size * SYNTHETIC.seq_length
        assert batch.ids_MT.shape == (layout.num_microbatches, length)
        rows += [tuple(row) for row in batch.ids_MT.view(-1, SYNTHETIC.seq_length).tolist()]
    return rows


def test_every_layout_consumes_the_same_global_batch() -> None:
    layouts = [
        Layout(dp=dp, micro_batch_size=mbs, num_microbatches=16 // dp // mbs)
        for dp, mbs in itertools.product((1, 2, 4), (1, 2, 4))
    ]
    batches = [sorted(global_batch(layout)) for layout in layouts]
    assert all(batch == batches[0] for batch in batches)
    assert len(set(batches[0])) == 16, "samples repeat"


def test_steps_and_seeds_give_other_tokens_and_the_same_ones_again() -> None:
    layout = Layout(micro_batch_size=4)
    assert global_batch(layout) == global_batch(layout)
    assert not set(global_batch(layout)) & set(global_batch(layout, step=1))
    assert not set(global_batch(layout)) & set(global_batch(layout, seed=1))


def test_a_target_is_the_next_token() -> None:
    source = SyntheticTokens(shape=SYNTHETIC, seed=0)
    batch = cut_batch(source, Layout(micro_batch_size=2), step=0, dp_rank=0)
    ids, targets = batch.ids_MT.view(2, -1), batch.targets_MT.view(2, -1)
    assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_a_token_tells_its_successor_most_of_the_time() -> None:
    source, layout = SyntheticTokens(shape=SYNTHETIC, seed=0), Layout(micro_batch_size=16)
    batches = [cut_batch(source, layout, step=step, dp_rank=0) for step in range(20)]
    ids = torch.cat([batch.ids_MT.flatten() for batch in batches])
    targets = torch.cat([batch.targets_MT.flatten() for batch in batches])
    counts = torch.zeros(SYNTHETIC.vocab_size, SYNTHETIC.vocab_size)
    counts.index_put_((ids, targets), torch.ones(len(ids)), accumulate=True)
    assert 0.75 < float(counts.amax(1).sum() / counts.sum()) < 0.9
    assert int(ids.max()) < SYNTHETIC.vocab_size
    frequencies = torch.bincount(ids, minlength=SYNTHETIC.vocab_size).float().sort().values
    assert float(frequencies[-32:].sum() / frequencies.sum()) > 0.4, "frequent words are frequent"
