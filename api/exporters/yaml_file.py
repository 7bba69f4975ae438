"""A trainer's configuration as a YAML file."""

from __future__ import annotations

import yaml

from api.exporters.base import ExportFile, ExportSource
from api.exporters.launch_script import commented
from search_spaces.trainers.base import TrainerAdapter


def yaml_file(name: str, adapter: TrainerAdapter, source: ExportSource) -> ExportFile:
    """The adapter's values, in their order, below the comments of the source."""
    head = commented((*source.head, f"Written for {adapter.target_version}."))
    values = yaml.safe_dump(dict(adapter.values(source.job)), sort_keys=False)
    return ExportFile(name=name, content=f"{head}\n{values}")
