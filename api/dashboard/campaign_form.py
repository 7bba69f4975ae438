"""A campaign's document as fields of a form, and back.

The document is the truth. Each field of the form is one line of text; what the form has no field
for, or what does not fit on a line, is YAML in the field `rest`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from layout_tuner.api.campaigns.named_models_and_clusters import PRESET_NAMES, preset_description
from layout_tuner.documents.json_and_yaml import read_yaml, write_yaml
from layout_tuner.documents.reading import Problems, read_mapping, shown
from layout_tuner.errors import CampaignInvalidError, DocumentMalformedError
from layout_tuner.results_db.campaigns.models_and_clusters import DescriptionKind
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.default_space import AUTO, ONLY_ASKED
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS

REST: Final = "rest"
_ALWAYS_SHOWN: Final = ("name", "model", "cluster", "space", "objective", "strategy", "budget")
_NAMES: Final = ("name", "model", "cluster", "strategy")
"""Fields whose text is taken as it stands."""
BUDGET: Final = ("trials", "node_hours", "wall_time")
SPACE: Final = ("global_batch_size", *LAYOUT_FIELDS, "allow_tp_across_nodes", "job")
SECTIONS: Final[Mapping[str, Collection[str]]] = {
    "budget": BUDGET,
    "space": ("preset", *SPACE),
    "probe": ("fidelity",),
}
_LINES: Final = ("objective", "baseline")
"""Fields whose text is YAML on one line."""

FORM_FIELDS: Final = (
    *_NAMES,
    *_LINES,
    *(f"{section}.{name}" for section, names in SECTIONS.items() for name in names),
    REST,
)


def document_of(form: Mapping[str, str]) -> dict[str, Any]:
    """A form's document; SearchSpaceError if fields are no YAML, or are in form and rest."""
    problems = Problems()
    document: dict[str, Any] = {name: form[name] for name in _NAMES if form.get(name)}
    for name in _LINES:
        with problems.collecting(name):
            if form.get(name):
                document[name] = _value(form[name], is_mapping=name == "baseline")
    for section, names in SECTIONS.items():
        values = {}
        for name in names:
            text = form.get(f"{section}.{name}", "")
            with problems.collecting(f"{section}.{name}"):
                if text:
                    values[name] = _value(text, is_mapping=name == "job")
        if values:
            document[section] = values
    with problems.collecting(REST):
        document = _merged(document, _rest(form.get(REST, "")))
    problems.refuse()
    space = document.get("space")
    if isinstance(space, dict) and space.keys() == {"preset"}:
        document["space"] = space["preset"]
    return document


def form_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a form for a document; `document_of` gives an equivalent document."""
    form = dict.fromkeys(FORM_FIELDS, "")
    rest = dict(document)
    for name in _NAMES:
        text = rest.get(name)
        if isinstance(text, str) and text.isprintable() and text == text.strip():
            form[name] = rest.pop(name)
    for name in _LINES:
        value = rest.get(name)
        if _fits_a_line(value) and (name != "baseline" or isinstance(value, Mapping)):
            form[name] = _line(rest.pop(name))
    if isinstance(rest.get("space"), str):
        rest["space"] = {"preset": rest["space"]}
    for section, names in SECTIONS.items():
        if not isinstance(rest.get(section), Mapping):
            continue
        inside = {name: value for name, value in rest.pop(section).items() if value is not None}
        if "wall_time_s" in inside and "wall_time" not in inside:
            inside["wall_time"] = inside.pop("wall_time_s")
        for name in names:
            if _fits_a_line(inside.get(name)):
                form[f"{section}.{name}"] = _line(inside.pop(name))
        if inside:
            rest[section] = inside
    form[REST] = yaml_of(rest) if rest else ""
    return form


def yaml_of(document: Mapping[str, Any]) -> str:
    """A document as YAML, in the order of its fields."""
    return write_yaml(dict(document), default_flow_style=None, width=90)


def like_campaign(store: Store, campaign: CampaignRecord, name: str) -> dict[str, Any]:
    """The document of a campaign like another one, without what is the default anyway.

    A model or cluster that is equal to a preset, or to a user's entry of its name, is its name.
    """
    document = campaign.spec
    described = {field: document[field] for field in ("name", "model", "cluster")}
    space = {"global_batch_size": 1}
    budget = {"trials": 1}
    plain = CampaignSpec.from_mapping({**described, "space": space, "budget": budget}).to_mapping()
    document = {
        field: value
        for field, value in document.items()
        if field in _ALWAYS_SHOWN or value != plain.get(field)
    }
    # An empty field means auto, so that every knob that was stated is shown; or it means the
    # default, so that `auto` is shown.
    stated = campaign.stored.spec.space
    document["space"] = {
        knob: value
        for knob, value in stated.to_mapping(every_knob=True).items()
        if knob not in (*stated.auto, "auto")
        and not (knob in ONLY_ASKED and KNOBS[knob].is_left_out(value))
    } | {knob: AUTO for knob in stated.auto if knob in ONLY_ASKED}
    if stated.job:
        document["space"]["job"] = {
            each.knob.name: list(each.values) for each in campaign.stored.spec.space.job.searched
        }
    for kind in PRESET_NAMES:
        named = document[kind].get("name")
        if _known(store, kind, named) == document[kind]:
            document[kind] = named
    return {**document, "name": name}


def _known(store: Store, kind: DescriptionKind, name: str) -> Mapping[str, Any] | None:
    if name in PRESET_NAMES[kind]:
        return preset_description(kind, name)
    own = [record for record in store.catalogue.find(kind) if record.name == name]
    return own[0].description if own else None


def _value(text: str, *, is_mapping: bool = False) -> Any:
    """The value of a line: YAML, or several values with commas between them."""
    if is_mapping and not text.lstrip().startswith("{"):
        text = f"{{{text}}}"
    try:
        values = read_yaml(f"[{text}]".encode())
    except DocumentMalformedError as error:
        raise CampaignInvalidError(
            f"{shown(text)} is not a value, several with commas between them, or a range such as "
            "{from: 1, to: 8, times: 2}"
        ) from error
    return values[0] if len(values) == 1 else values


def _fits_a_line(value: object) -> bool:
    """Whether the form can show a value, and reading the line gives it back."""
    return value is not None and value != [] and "\n" not in _line(value)


def _line(value: Any) -> str:
    """YAML of a value on one line, without the brackets of a list."""
    listed = value if isinstance(value, list) and len(value) > 1 else [value]
    return write_yaml(listed, default_flow_style=True, width=1 << 20).strip()[1:-1]


def _rest(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        rest = read_yaml(text.encode("utf-8", "backslashreplace"))
    except DocumentMalformedError as error:
        raise CampaignInvalidError(str(error)) from error
    return {} if rest is None else read_mapping(rest, CampaignInvalidError, "this text")


def _merged(document: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Both together, with divided sections; CampaignInvalidError if a field is in both."""
    merged = dict(document)
    for name, value in rest.items():
        if name not in merged:
            merged[name] = value
        elif isinstance(value, Mapping) and isinstance(merged[name], Mapping):
            merged[name] = _merged(merged[name], value)
        else:
            raise CampaignInvalidError(
                f"{shown(name)} is here and in a field of its own; delete one of them"
            )
    return merged
