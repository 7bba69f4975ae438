import math

import pytest

from benchmarks.side_by_side import LossesDifferError, Series, ratio, refuse_different_losses
from benchmarks.workers.forked_ranks import RankFailedError, run_ranks
from workers.trainer.open_training import RankContext

pytestmark = pytest.mark.ranks


def make_series(*losses: float) -> Series:
    return Series(step_times_s=(1.0,), cpu_times_s=(1.0,), losses=losses)


def test_a_ratio_is_over_one_where_the_peer_takes_longer():
    found = ratio([1.0, 2.0, 4.0], [2.0, 3.0, 4.0])
    assert found.of_medians == 1.5
    assert (found.q25, found.of_pairs, found.q75) == (1.25, 1.5, 1.75)


def test_losses_that_differ_are_named():
    series = {"ours": make_series(4.0, 3.0), "bare": make_series(4.0, 3.3)}
    assert refuse_different_losses(series, tolerance=0.2, what="cell")["bare"] == pytest.approx(0.1)
    with pytest.raises(LossesDifferError, match=r"cell: losses of ours and bare differ by 1.0e-01"):
        refuse_different_losses(series, tolerance=0.05, what="cell")


@pytest.mark.parametrize("losses", [(math.nan, 3.0), (4.0, math.nan), (math.nan, math.nan)])
def test_a_loss_that_is_no_number_differs(losses: tuple[float, float]):
    series = {"ours": make_series(4.0, 3.0), "bare": make_series(*losses)}
    with pytest.raises(LossesDifferError, match="differ by nan"):
        refuse_different_losses(series, tolerance=0.5, what="cell")


def test_ranks_return_what_they_computed_in_their_order():
    assert run_ranks(3, lambda ctx: (ctx.rank, ctx.world_size)) == [(0, 3), (1, 3), (2, 3)]


def test_the_first_rank_that_fails_ends_the_others():
    def work(ctx: RankContext) -> None:
        if ctx.rank == 1:
            raise ArithmeticError("no such number")
        ctx.store.get("never")

    with pytest.raises(RankFailedError, match="no such number"):
        run_ranks(2, work)
