"""Launch scripts that we export for own scripts are read back, with the files beside them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.trainers.accelerate import accelerate_backend
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.registry import ADAPTERS
from tests.exports.exported_files import write_export
from tests.exports.legal_jobs import legal_jobs


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "command"])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_exported_script_is_read_back(name: str, data: st.DataObject) -> None:
    job = data.draw(legal_jobs(name))
    with tempfile.TemporaryDirectory() as folder:
        write_export(Path(folder), name, job, without=ADAPTERS[name].all_lacking(job))
        (script,) = Path(folder).glob("*.sh")
        found = read_job(JobFile.open(script))
    whole = completed(found)
    expected = job.layout
    if name == "accelerate" and accelerate_backend(expected) == "MEGATRON_LM":
        comm = "p2p" if expected.cp > 1 else "all_gather"  # what the plugin does
        expected = replace(expected, recompute="full", cp_comm_type=comm)
    assert whole.model == job.model
    assert whole.layout == expected
    assert found.trainer == name
    assert not found.open_fields
