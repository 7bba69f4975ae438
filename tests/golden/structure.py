"""Documents of the product's structure; nothing in them may change in a restructuring."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import click
import sqlalchemy as sa

from benchmarks.service.postgres_server import running_server
from layout_tuner.api.openapi_document import openapi_text
from layout_tuner.cli.main import main
from layout_tuner.results_db.migrations import migrate
from tests.golden.service import recorded

PROSE_KEYS: Final = {"title", "description", "summary", "example", "examples"}
_OF_PARAMETERS: Final = ("name", "help", "opts", "secondary_opts", "param_type_name", "type")
_OF_COLUMNS: Final = ("name", "primary_key")
METHODS: Final = ("get", "put", "post", "patch", "delete")


def compact(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(value, sort_keys=True, default=str)


def stated(values: Mapping[str, Any], *, but: Collection[str] = ()) -> str:
    """What is set of some properties, as one line."""
    kept = {
        key: value
        for key, value in values.items()
        if key not in but and value is not None and value is not False and value not in ([], {})
    }
    return f" {compact(kept)}" if kept else ""


def commands() -> list[str]:
    """Every command with its arguments in order and its options by name."""
    context = click.Context(main, info_name="layout-tuner", **main.context_settings)
    return list(_command("layout-tuner", main.to_info_dict(context)))


def _command(name: str, command: dict[str, Any]) -> Iterator[str]:
    """A command with its parameters, then its subcommands."""
    yield name + stated({key: command.get(key) for key in ("hidden", "deprecated", "chain")})
    arguments = [p for p in command["params"] if p["param_type_name"] == "argument"]
    options = [p for p in command["params"] if p["param_type_name"] != "argument"]
    for parameter in [*arguments, *sorted(options, key=lambda p: str(p["opts"]))]:
        names = "/".join(parameter["opts"] + parameter["secondary_opts"])
        kind = stated(parameter["type"], but=("name", "param_type"))
        rest = stated(parameter, but=_OF_PARAMETERS)
        yield f"  {names}: {parameter['type']['name']}{kind}{rest}"
    for child, inner in sorted(command.get("commands", {}).items()):
        yield from _command(f"{name} {child}", inner)


def api() -> list[str]:
    """Every route, and every schema at the first place that it is used at.

    Schemas are named by place and not by class, so that classes may be renamed and merged.
    """
    document = json.loads(openapi_text())
    schemas = _Schemas(document["components"]["schemas"])
    lines = []
    for path, operations in sorted(document["paths"].items()):
        for method in METHODS:
            if method in operations:
                lines += _operation(f"{method.upper()} {path}", operations[method], schemas)
    return lines + schemas.lines


def _operation(route: str, operation: dict[str, Any], schemas: _Schemas) -> Iterator[str]:
    yield f"{route} {operation['operationId']} {compact(operation.get('security'))}"
    parameters = operation.get("parameters", [])
    for each in sorted(parameters, key=lambda p: (p["in"], p["name"])):
        needed = "*" if each.get("required") else ""
        shape = schemas.shape(each["schema"], f"{route} {each['name']}")
        yield f"  {each['in']} {each['name']}{needed}: {shape}"
    answers = {"body": operation.get("requestBody", {}), **operation["responses"]}
    for kind, answer in sorted(answers.items()):
        for media, content in sorted(answer.get("content", {}).items()):
            shape = schemas.shape(content["schema"], f"{route} {kind}")
            yield f"  {kind}{'*' if answer.get('required') else ''} {media}: {shape}"
        if kind != "body" and not answer.get("content"):
            yield f"  {kind} without a body"
        for header in sorted(answer.get("headers", {})):
            yield f"  {kind} header {header}"


class _Schemas:
    """Writes schemas; those of equal content have one name."""

    def __init__(self, by_class: dict[str, Any]) -> None:
        self._by_class = by_class
        self._places: dict[str, str] = {}
        self.lines: list[str] = []

    def shape(self, schema: dict[str, Any], place: str) -> str:
        """A schema in one line; schemas that it refers to are named, and written if still new."""
        rest = {key: value for key, value in schema.items() if key not in PROSE_KEYS}
        words = []
        if "$ref" in rest:
            words.append(self._place(rest.pop("$ref").rpartition("/")[2], place))
        if "anyOf" in rest:
            words.append(" | ".join(sorted(self.shape(each, place) for each in rest.pop("anyOf"))))
        if "items" in rest:
            words.append(f"[{self.shape(rest.pop('items'), f'{place}[]')}]")
        if isinstance(rest.get("additionalProperties"), dict):
            words.append(f"{{{self.shape(rest.pop('additionalProperties'), f'{place}{{}}')}}}")
        kind = rest.pop("type", None)
        return " ".join([*([kind] if kind else []), *words, *([compact(rest)] if rest else [])])

    def _place(self, name: str, place: str) -> str:
        """The first place of a class's schema."""
        content = compact(self._expanded(self._by_class[name]))
        if content not in self._places:
            self._places[content] = place
            schema = dict(self._by_class[name])
            needed = schema.pop("required", [])
            properties = schema.pop("properties", {})
            at = len(self.lines)
            lines = [f"<{place}> {self.shape(schema, place)}"]
            for field, inner in sorted(properties.items()):
                shape = self.shape(inner, f"{place}.{field}")
                lines.append(f"  {field}{'*' if field in needed else ''}: {shape}")
            self.lines[at:at] = lines
        return f"<{self._places[content]}>"

    def _expanded(self, value: Any, *, are_fields: bool = False) -> Any:
        """A schema without prose, with the schemas that it refers to in their place."""
        if isinstance(value, list):
            return sorted((self._expanded(each) for each in value), key=compact)
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return self._expanded(self._by_class[value["$ref"].rpartition("/")[2]])
        return {
            key: self._expanded(each, are_fields=key == "properties")
            for key, each in value.items()
            if are_fields or key not in PROSE_KEYS
        }


def sqlite_tables() -> list[str]:
    """The tables of an upgraded SQLite database."""
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite:///{directory}/results.sqlite"
        migrate.upgrade(url)
        return tables_of(url)


def postgresql_tables() -> list[str]:
    """The tables of an upgraded PostgreSQL database."""
    with running_server() as server, server.database() as url:
        migrate.upgrade(url)
        return tables_of(url)


_DEFINITIONS = {
    "sqlite": "SELECT sql FROM sqlite_master WHERE type IN ('index', 'trigger', 'view') UNION ALL "
    "SELECT name || ' never reuses ids' FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%'",
    "postgresql": "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' "
    "AND indexname NOT IN (SELECT conname FROM pg_constraint) UNION ALL "
    "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal UNION ALL "
    "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
}


def tables_of(url: str) -> list[str]:
    """Tables as SQLAlchemy reads them; indexes, triggers and functions as a query lists them."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    definitions = _DEFINITIONS[engine.dialect.name]
    try:
        inspector = sa.inspect(engine)
        lines = []
        for table in sorted(inspector.get_table_names()):
            lines.append(table)
            for column in sorted(inspector.get_columns(table), key=lambda c: c["name"]):
                kind = column.pop("type").compile(engine.dialect)
                needed = "" if column.pop("nullable") else " not null"
                lines.append(f"  {column['name']} {kind}{needed}{stated(column, but=_OF_COLUMNS)}")
            lines.append(f"  primary key{stated(inspector.get_pk_constraint(table))}")
            found = {
                "unique": inspector.get_unique_constraints(table),
                "check": inspector.get_check_constraints(table),
                "foreign key": inspector.get_foreign_keys(table),
            }
            for kind, constraints in found.items():
                lines += sorted(f"  {kind}{stated(each)}" for each in constraints)
        with engine.connect() as connection:
            texts = [text for text in connection.scalars(sa.text(definitions)) if text is not None]
        return [*lines, *sorted(re.sub(r"\s+", " ", text) for text in texts)]
    finally:
        engine.dispose()


def of_service(name: str) -> list[str]:
    """Lines that were recorded at the service, without those of prose."""
    return [line for line in recorded()[name] if not line.startswith("prose ")]


def prose_of_exports() -> list[str]:
    """Comments and notes of the exported files; a change of wording rewrites them."""
    return [line.removeprefix("prose   ") for line in recorded()["exports"] if "prose " in line]
