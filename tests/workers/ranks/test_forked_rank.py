"""What a rank is given of its node."""

from __future__ import annotations

import pytest

from workers.errors import CoresForbiddenError
from workers.ranks.forked_rank import allowed_cores

pytestmark = pytest.mark.ranks


def test_a_rank_gets_those_of_its_cores_that_the_node_gives_us() -> None:
    assert allowed_cores((1, 2, 3), {0, 2, 3, 4}) == {2, 3}


def test_cores_that_the_node_keeps_to_itself_are_refused_with_both_lists() -> None:
    with pytest.raises(CoresForbiddenError) as refused:
        allowed_cores((64, 65), {1, 0})
    assert str(refused.value).startswith(
        "this process may use none of the cores [64, 65], only [0, 1]; correct device_cores"
    )
