"""What a rank says of its own failure."""

from search_spaces.protocol.outcome import Outcome
from workers.rank_jobs.rank import _one_line


def test_an_error_that_quotes_a_name_of_no_encoding_still_makes_an_outcome() -> None:
    said = _one_line(OSError("cannot open weights-\udcff.bin\nand more"))
    assert said == "OSError: cannot open weights-\\udcff.bin"
    assert Outcome(state="failed", reason="crashed", message=said).message == said
