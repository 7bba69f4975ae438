"""The versions that workers and calibrations state."""

from __future__ import annotations

from importlib import metadata

import pytest

from layout_tuner.workers.trainer.revision import software_versions


def test_a_machine_without_ray_states_the_versions_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert software_versions()["ray"] == metadata.version("ray")
    found = metadata.version

    def version(package: str) -> str:
        if package == "ray":
            raise metadata.PackageNotFoundError(package)
        return found(package)

    monkeypatch.setattr(metadata, "version", version)
    assert set(software_versions()) == {"python", "torch", "numpy", "git_revision"}
