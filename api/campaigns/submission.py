"""Makes campaigns of documents: resolves, checks and stores them, once for each request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from layout_tuner.api.campaigns.named_models_and_clusters import with_own
from layout_tuner.documents.limits import name_problem
from layout_tuner.documents.reading import MAX_NAME_LENGTH, Problems, read_mapping
from layout_tuner.errors import CampaignInvalidError, SearchSpaceError, SpaceInvalidError
from layout_tuner.predictions.belief.plan import Plan
from layout_tuner.protocol.worker_messages import declared_knobs
from layout_tuner.results_db.access.owners_and_groups import DEFAULT_SHARING, Sharing
from layout_tuner.results_db.campaigns.campaigns import name_taken
from layout_tuner.results_db.campaigns.idempotency_keys import RequestKey
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.errors import (
    CampaignDuplicateError,
    CampaignNotFoundError,
    IdempotencyKeyInUseError,
)
from layout_tuner.results_db.records import CampaignRecord, PlanRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import (
    FEW,
    IMPOSSIBLE,
    MAX_WARNINGS,
    UNKNOWN_TRAINER,
    CampaignSpec,
)
from layout_tuner.search_spaces.campaigns.campaign_settings import SimulationSettings
from layout_tuner.search_spaces.campaigns.default_space import AUTO, ONLY_ASKED
from layout_tuner.search_spaces.clusters.calibration_file import with_measured_constants
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.jobs.job_choices import SEARCHED, JobChoices
from layout_tuner.search_spaces.spaces.space_presets import space_knobs
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.parameters import parameter_texts, read_declarations
from layout_tuner.trainers.registry import adapter_named

MAX_CLONES: Final = 1000
"""Names that are tried for a clone without a name."""

_SPACE_DEPENDS_ON: Final = frozenset({"model", "cluster", "objective", "constraints"})
"""Fields of a document that decide on the choices of knobs which its space leaves out."""

_UNCHECKED: Final = "the parameters of the trainer"

_STATED: Final = "the submitted document says: "
"""The beginning of a warning that a submitted document has: it is not the service's own."""

MAX_AT_ONCE: Final = 50_000
"""Most legal layouts that are planned while a client waits; the driver plans larger spaces."""


class Submission:
    """Makes campaigns and plans of documents and of earlier campaigns."""

    def __init__(
        self, store: Store, data_dir: Path | None, sharing: Sharing = DEFAULT_SHARING
    ) -> None:
        self._store = store
        self._data_dir = data_dir
        self.sharing = sharing
        """Who sees its campaigns, their group and their priority."""

    def create(
        self, document: Any, key: str | None, *, returns_equal: bool = False
    ) -> tuple[CampaignRecord, bool]:
        """Makes the campaign of a document, or finds the one that the same request made.

        With `returns_equal` it also finds one of the same name and content.

        Returns:
            The campaign, and whether an earlier request made it.
        """
        request = _request_key(key, "create", document, self.sharing)
        try:
            return self._once(request, lambda: self._keep(self.resolve(document), request))
        except CampaignDuplicateError:
            if not returns_equal:
                raise
            return self._equal(self.resolve(document)), True

    def _equal(self, spec: CampaignSpec) -> CampaignRecord:
        """The campaign of the same name and content; CampaignDuplicateError if it has another."""
        found = self._store.campaigns.by_name(spec.name)
        if others := found.stored.spec.differences(spec):
            raise CampaignDuplicateError(
                f"a campaign named {spec.name!r} exists already, and has another "
                f"{', '.join(others)}; choose another name"
            )
        return found

    def clone(
        self,
        original: CampaignRecord,
        changes: Any,
        key: str | None,
        sharing: Mapping[str, Any] | None = None,
    ) -> tuple[CampaignRecord, bool]:
        """Makes a campaign like another one, with changes in some fields of its document.

        Those who see the original see it, unless `sharing`, fields of a `Sharing`, says otherwise.
        """
        group = original.group if original.visibility == "group" else None
        like = {"visibility": original.visibility, "group": group}
        self.sharing = Sharing(**{**like, **(sharing or {})})
        request = _request_key(key, f"clone {original.id}", changes, self.sharing)
        return self._once(request, lambda: self._keep_clone(original, changes, request))

    def _keep_clone(
        self, original: CampaignRecord, changes: Any, request: RequestKey | None
    ) -> CampaignRecord:
        given = read_mapping(changes, CampaignInvalidError, "the body")
        # A campaign of an older version may lack knobs, which have the defaults of that version.
        before = original.stored.spec
        space = before.space.to_mapping(every_knob=True)
        document = {**before.to_mapping(), "space": space, **given}
        if "cluster" in given:
            document["warnings"] = []  # they were about the other cluster
        auto = before.space.auto
        if auto and given.keys() & _SPACE_DEPENDS_ON and "space" not in given:
            # Without the new knobs at their default, which are in no list of automatic ones.
            space = before.space.to_mapping()
            asked = {k: AUTO for k in auto if k in ONLY_ASKED}
            kept = {k: v for k, v in space.items() if k not in (*auto, "auto")}
            document["space"] = kept | asked
        names = () if given.get("name") is not None else numbered(original.name)
        if names:
            document["name"] = names[0]
        keeps_knobs = not given.keys() & {"space", "probe"}
        spec = self.resolve(document, keeps_knobs=keeps_knobs)
        # Not where more people see the clone than the original.
        is_named = self.sharing.visibility in ("private", original.visibility)
        notes = f"clone of {original.name}" if is_named else ""
        return self._keep(spec, request, notes=notes, names=names)

    def free_name(self, name: str) -> str:
        """The first free name for a campaign like another one."""
        for free in numbered(name):
            try:
                self.refuse_taken(free)
            except CampaignDuplicateError:
                continue
            return free
        return ""

    def resolve(self, document: Any, *, keeps_knobs: bool = False) -> CampaignSpec:
        """Reads a document, with users' models and clusters and measured constants in it.

        The declarations of job knobs that it brings count where it `keeps_knobs`, as clones do, and
        no worker has declared any. Its warnings are marked as the submitter's, but for those that
        the service once wrote.

        Raises SearchSpaceError with all wrong fields.
        """
        problems = Problems()
        described = with_own(self._store, self._with_marked(document), problems)
        with problems.collecting():
            described = _with_measured_constants(described, self._data_dir)
        with problems.collecting():
            described = self._with_declared_knobs(described, keeps_knobs=keeps_knobs)
            largest_allocation = partial(
                self._store.workers.largest_allocation,
                is_simulated=isinstance(described, Mapping) and bool(described.get("simulated")),
            )
            spec = CampaignSpec.from_document(described, largest_allocation)
            if spec.simulated is not None:
                # By the version of the simulator that workers have now.
                spec = replace(spec, simulated=SimulationSettings(seed=spec.simulated.seed))
            # Tables cannot hold every name; older campaigns with such names stay readable.
            for part in ("model", "cluster"):
                if problem := name_problem(getattr(spec, part).name):
                    raise CampaignInvalidError(problem, field=f"{part}.name")
            spec = self._with_checked_parameters(spec)
        problems.refuse()
        return spec

    def _with_declared_knobs(self, document: Any, *, keeps_knobs: bool) -> Any:
        """The document with its job knobs as workers with its trainer declare them.

        Where no worker has declared any, the catalogue of the trainer's adapter counts, and not
        what the document itself declares. A malformed document is left unchanged.

        Raises:
            SpaceInvalidError: no worker that has the trainer lets campaigns set the values.
        """
        if not isinstance(document, Mapping):
            return document
        trainer = _section(document, "probe").get("trainer", EMBEDDED_TRAINER)
        listed = document.get("layouts")
        layouts = [document.get("baseline"), *(listed if isinstance(listed, (list, tuple)) else ())]
        jobs = [each.get("job") for each in layouts if isinstance(each, Mapping)]
        stated = {name for job in jobs if isinstance(job, Mapping) for name in job}
        try:
            space = space_knobs(document.get("space", {}))
            cluster = resolve_cluster(document.get("cluster", ""))[0].name
        except SearchSpaceError:
            return document
        asked = space.get("job", {})
        if not isinstance(trainer, str) or not isinstance(asked, Mapping) or not (asked or stated):
            return document
        plain = {name: _searched(value) for name, value in asked.items()}
        declared = self._store.workers.declared_knobs(cluster, trainer)
        if not declared or None in declared:
            is_kept = keeps_knobs or not asked
            return document if is_kept else {**document, "space": {**space, "job": plain}}
        adapter, refusals = adapter_named(trainer), []
        known = {} if adapter is None else adapter.job_knobs
        for each in declared:
            knobs = declared_knobs(each)
            # Knobs that are set and not searched have their default, unless the adapter's count.
            others = [k for k in sorted(stated - asked.keys()) if k in knobs]
            plain |= {k: [knobs[k].default] for k in others if knobs[k] != known.get(k)}
            if not plain:
                return document
            try:
                choices = JobChoices.of(plain, knobs, trainer)
            except SpaceInvalidError as error:
                refusals.append(error)
            else:
                return {**document, "space": {**space, "job": choices.to_mapping()}}
        raise refusals[0].within("job").within("space")

    def _with_marked(self, document: Any) -> Any:
        """The document, its warnings marked as the submitter's; those made anew are left out.

        A document that is written out again has warnings of the service, which stored campaigns
        have too. A malformed document is left unchanged.
        """
        warnings = document.get("warnings") if isinstance(document, Mapping) else None
        if not isinstance(warnings, (list, tuple)) or len(warnings) > MAX_WARNINGS:
            return document
        if not warnings or not all(isinstance(each, str) for each in warnings):
            return document
        own = self._store.campaigns.own_warnings(warnings)
        marked = [
            each if each in own or each.startswith(_STATED) else f"{_STATED}{each}"
            for each in warnings
            if not each.startswith((_UNCHECKED, UNKNOWN_TRAINER, FEW, IMPOSSIBLE))
        ]
        return {**document, "warnings": marked}

    def _with_checked_parameters(self, spec: CampaignSpec) -> CampaignSpec:
        """The campaign, with a warning if no worker has reported what its trainer accepts.

        The warning about a trainer without an adapter goes where a worker has such a trainer.

        Raises:
            ParameterInvalidError: no worker that has the trainer accepts the parameters.
        """
        probe, cluster = spec.probe, spec.cluster.name
        if probe.trainer == EMBEDDED_TRAINER:
            return spec
        declared = self._store.workers.declared_parameters(cluster, probe.trainer)
        settled = (_UNCHECKED, UNKNOWN_TRAINER) if declared else _UNCHECKED
        kept = tuple(each for each in spec.warnings if not each.startswith(settled))
        refusals = []
        for each in declared:
            try:
                if each is not None:
                    parameter_texts(read_declarations(each), probe.parameters)
                    return replace(spec, warnings=kept)
            except SearchSpaceError as error:
                refusals.append(error)
        if refusals and len(refusals) == len(declared):
            raise refusals[0].within("parameters").within("probe")
        if probe.parameters:
            why = f"no worker of cluster {cluster} with it has registered yet"
            if declared:
                why = f"a worker of cluster {cluster} does not report what it accepts"
            kept += (
                f"{_UNCHECKED} {probe.trainer} could not be checked: {why}; a wrong one fails each "
                "trial",
            )
        return replace(spec, warnings=kept)

    def plan(self, document: Any, options: PlanOptions, *, by_driver: bool) -> Plan | PlanRecord:
        """The plan of a document that could be submitted, with the measurements there are.

        It knows the measurements from which the campaign would start if it were submitted now. The
        plan of a large space is requested of the driver, and stored, if `by_driver`.

        Raises:
            SearchSpaceError: the document would be refused, or has too many legal layouts.
            PlanLimitError: too many plans wait for the driver.
        """
        spec = self.resolve(document)
        self.refuse_unknown_sources(spec)
        legal = spec.legal_set()
        if len(legal) <= MAX_AT_ONCE:
            return self._store.plans.make(spec, options, legal=legal)
        if by_driver:
            spec.refuse_if_too_large(legal)
            spec.warned_of_space(legal)
            return self._store.plans.request(spec.to_mapping(), options)
        raise CampaignInvalidError(
            f"{len(legal):,} legal layouts are more than {MAX_AT_ONCE:,}, the most that this page "
            "plans; use `layout-tuner campaign submit FILE --dry-run` or `layout-tuner plan FILE`",
            field="space",
        )

    def _made_before(self, request: RequestKey | None) -> CampaignRecord | None:
        return None if request is None else self._store.campaigns.of_request(request)

    def _once(
        self, request: RequestKey | None, make: Callable[[], CampaignRecord]
    ) -> tuple[CampaignRecord, bool]:
        made = self._made_before(request)
        if made is not None:
            return made, True
        try:
            return make(), False
        except (CampaignDuplicateError, IdempotencyKeyInUseError):
            # A copy of the request was faster.
            made = self._made_before(request)
            if made is None:
                raise
            return made, True

    def _keep(
        self,
        spec: CampaignSpec,
        request: RequestKey | None,
        *,
        notes: str = "",
        names: Sequence[str] = (),
    ) -> CampaignRecord:
        if not names:
            self.refuse_taken(spec.name)
        self.refuse_unknown_sources(spec)
        legal = spec.legal_set()
        spec.refuse_if_too_large(legal)
        jobs = spec.jobs(legal)
        return self._store.campaigns.create(
            spec.warned_of_space(legal, jobs).to_mapping(),
            num_legal_layouts=len(jobs),
            request=request,
            notes=notes,
            names=names,
            sharing=self.sharing,
        )

    def refuse_taken(self, name: str) -> None:
        """Refuses a taken name (CampaignDuplicateError) early; the database checks it again."""
        try:
            self._store.campaigns.by_name(name)
        except CampaignNotFoundError:
            return
        raise name_taken(name)

    def refuse_unknown_sources(self, spec: CampaignSpec) -> None:
        """Refuses campaigns in `start_from` that its owner does not see, or that are simulated.

        Raises:
            CampaignInvalidError: there is no campaign of such a name, or it is simulated and this
                one is not, or the other way round.
        """
        for name in spec.start_from:
            try:
                found = self._store.as_member().campaigns.by_name(name)
                if found.is_simulated != (spec.simulated is not None):
                    which = "simulated" if found.is_simulated else "measured"
                    problem = f"campaign {name!r} is {which}, and this one is not"
                    raise CampaignInvalidError(problem, field="start_from")
            except CampaignNotFoundError as error:
                raise CampaignInvalidError(str(error), field="start_from") from error


def numbered(name: str) -> tuple[str, ...]:
    """Names for further campaigns like one of this name, in order of preference."""
    suffixes = [f"-{number}" for number in range(2, MAX_CLONES + 2)]
    return tuple(name[: MAX_NAME_LENGTH - len(suffix)] + suffix for suffix in suffixes)


def _request_key(key: str | None, what: str, document: Any, sharing: Sharing) -> RequestKey | None:
    """The key of the request, and a hash of its content."""
    if key is None:
        return None
    shared = "" if sharing == DEFAULT_SHARING else f" {sharing}"
    content = json.dumps([f"{what}{shared}", document], sort_keys=True)
    return RequestKey(key=key, request_hash=hashlib.sha256(content.encode()).hexdigest())


def _with_measured_constants(document: Any, data_dir: Path | None) -> Any:
    """The document with measured constants of its cluster; a malformed one is left unchanged."""
    if data_dir is None or not isinstance(document, Mapping) or "cluster" not in document:
        return document
    try:
        return {**document, "cluster": with_measured_constants(document["cluster"], data_dir)}
    except SearchSpaceError as error:
        raise error.within("cluster") from error


def _section(document: Any, name: str) -> Mapping[str, Any]:
    """A part of a document that may be malformed; empty: it is no mapping."""
    part = document.get(name) if isinstance(document, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _searched(value: Any) -> Any:
    """The searched values of a knob, without a declaration that was stored with them."""
    return value[SEARCHED] if isinstance(value, Mapping) and SEARCHED in value else value
