from __future__ import annotations

import gc

from api.process.gc_tuning import YOUNG_AT_MOST, keep_for_good, nothing_collected


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_collection_resumes_after_the_block() -> None:
    with nothing_collected():
        assert not gc.isenabled()
        with nothing_collected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_objects_of_the_start_are_not_collected_again() -> None:
    kept, threshold = Node(), gc.get_threshold()
    try:
        keep_for_good()
        assert gc.get_threshold() == (YOUNG_AT_MOST, *threshold[1:])
        assert not any(each is kept for each in gc.get_objects())
        later = Node()
        assert any(each is later for each in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.freeze()  # as it was: tests/conftest.py froze what had been collected
        gc.set_threshold(*threshold)
