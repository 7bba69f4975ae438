"""Sites: presets, and the site in a user's description of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources

from layout_tuner.documents.dataclass_documents import within
from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.documents.reading import read_mapping
from layout_tuner.errors import SiteInvalidError
from layout_tuner.search_spaces.clusters.site import SITE_PRESETS, Site, refuse_unknown_site


def site_preset(name: str) -> Site | None:
    """The preset of that name, or None."""
    if name not in SITE_PRESETS:
        return None
    content = resources.files(__package__).joinpath("sites", f"{name}.yaml").read_bytes()
    return Site.from_mapping(read_yaml(content))


def site_of(described: object) -> Site | None:
    """The site in a user's description of a cluster; None: it has none.

    The field `site` of the description holds a preset's name, or fields, which may change a preset.
    Without that field, the site of the cluster's preset is used.

    Raises:
        SiteInvalidError: the site is unknown or impossible.
    """
    if isinstance(described, str):
        return site_preset(described)
    if not isinstance(described, Mapping):
        return None
    if "site" in described:
        return within("site", _read_site, described["site"])
    preset = described.get("preset", described.get("name"))
    return site_preset(preset) if isinstance(preset, str) else None


def _read_site(described: object) -> Site:
    if isinstance(described, str):
        return _preset_or_refuse(described)
    values = read_mapping(described, SiteInvalidError, "the site")
    if "preset" not in values:
        return Site.from_mapping(values)
    base = _preset_or_refuse(values.pop("preset"))
    changes = Site.from_mapping(values)
    return replace(base, **{name: getattr(changes, name) for name in values})


def _preset_or_refuse(name: object) -> Site:
    refuse_unknown_site(name)
    site = site_preset(str(name))
    assert site is not None, "it is one of SITE_PRESETS"
    return site
