"""When the allocation ends is looked up now and then, and a look that fails changes nothing."""

from __future__ import annotations

import time
from queue import SimpleQueue

from workers.errors import WorkerError
from workers.worker.events import EndMoved, Events
from workers.worker.worker import AllocationEnd, ends_after


def test_the_end_is_told_again_when_it_has_moved_and_a_failed_look_is_no_end() -> None:
    events: Events = SimpleQueue()
    answers = iter([100.0, None, 50.0])

    def look() -> float:
        answer = next(answers, 50.0)
        if answer is None:
            raise WorkerError("the scheduler's controller is away")
        return answer

    started = time.monotonic()
    end = AllocationEnd(look, events, look_every_s=0.01)
    told = [events.get(timeout=30) for _ in range(2)]
    end.close()
    ends = [event.ends_at for event in told if isinstance(event, EndMoved)]
    assert len(ends) == 2
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0] > started + 99 > ends[1]


def test_seconds_that_a_user_gives_count_from_when_they_are_given() -> None:
    left_s = ends_after(1000.0)
    first = left_s()
    assert first is not None
    assert 900 < first <= 1000
    later = left_s()
    assert later is not None
    assert later <= first
    assert ends_after(0.0)() == 0.0
