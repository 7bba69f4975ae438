"""From a document to a campaign: resolved, checked, kept; once, however often the request is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from api.catalogue import with_own
from results_db.errors import (
    CampaignDuplicateError,
    CampaignNotFoundError,
    IdempotencyKeyInUseError,
)
from results_db.idempotency import RequestKey
from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.campaign import CampaignSpec
from search_spaces.errors import CampaignInvalidError, SearchSpaceError
from search_spaces.measured_constants import with_measured_constants
from search_spaces.reading import MAX_NAME_LENGTH, read_mapping

MAX_CLONES: Final = 1000
"""Names that are tried for a clone that was given none."""


class Submission:
    """Campaigns are made here, of new documents and of earlier campaigns."""

    def __init__(self, store: Store, data_dir: Path | None) -> None:
        self._store = store
        self._data_dir = data_dir

    def create(self, document: Any, key: str | None) -> tuple[CampaignRecord, bool]:
        """Makes the campaign that a document describes, or finds the one that this request made.

        Returns:
            The campaign, and whether it was made by an earlier sending of the request.
        """
        request = _request_key(key, "create", document)
        made = self._made_before(request)
        if made is not None:
            return made, True
        return self._keep_once(self._resolve(document), request, notes="")

    def clone(
        self, original: CampaignRecord, changes: Any, key: str | None
    ) -> tuple[CampaignRecord, bool]:
        """Makes a campaign like another one but for these fields of its document."""
        request = _request_key(key, f"clone {original.id}", changes)
        made = self._made_before(request)
        if made is not None:
            return made, True
        given = read_mapping(changes, CampaignInvalidError, "the body")
        document = {**original.spec, **given}
        if "cluster" in given:
            document["warnings"] = []  # they are of the cluster that was
        if given.get("name") is None:
            document["name"] = self._free_name(original.name)
        spec = self._resolve(document)
        return self._keep_once(spec, request, notes=f"clone of {original.name}")

    def _resolve(self, document: Any) -> CampaignSpec:
        described = with_own(self._store, document)
        return CampaignSpec.from_mapping(_with_measured_constants(described, self._data_dir))

    def _made_before(self, request: RequestKey | None) -> CampaignRecord | None:
        return None if request is None else self._store.campaign_of_request(request)

    def _keep_once(
        self, spec: CampaignSpec, request: RequestKey | None, *, notes: str
    ) -> tuple[CampaignRecord, bool]:
        try:
            return self._keep(spec, request, notes=notes), False
        except (CampaignDuplicateError, IdempotencyKeyInUseError):
            # Sent twice at once, the other one was quicker.
            made = self._made_before(request)
            if made is None:
                raise
            return made, True

    def _keep(
        self, spec: CampaignSpec, request: RequestKey | None, *, notes: str
    ) -> CampaignRecord:
        self._refuse_taken(spec.name)
        self._refuse_unknown_sources(spec)
        legal = spec.legal_set()
        spec.refuse_if_too_large(legal)
        return self._store.create_campaign(
            spec.to_mapping(), num_legal_layouts=len(legal), request=request, notes=notes
        )

    def _refuse_taken(self, name: str) -> None:
        """Says so before the legal set is enumerated; the database has the last word."""
        if self._is_taken(name):
            raise CampaignDuplicateError(
                f"a campaign named {name!r} exists already; choose another name"
            )

    def _is_taken(self, name: str) -> bool:
        try:
            self._store.campaign_by_name(name)
        except CampaignNotFoundError:
            return False
        return True

    def _refuse_unknown_sources(self, spec: CampaignSpec) -> None:
        for name in spec.start_from:
            try:
                self._store.campaign_by_name(name)
            except CampaignNotFoundError as error:
                raise CampaignInvalidError(str(error), field="start_from") from error

    def _free_name(self, name: str) -> str:
        for number in range(2, MAX_CLONES + 2):
            suffix = f"-{number}"
            free = name[: MAX_NAME_LENGTH - len(suffix)] + suffix
            if not self._is_taken(free):
                return free
        raise CampaignDuplicateError(
            f"{name!r} has been cloned {MAX_CLONES} times; give the clone a name of its own"
        )


def _request_key(key: str | None, what: str, document: Any) -> RequestKey | None:
    """What tells the request again: its key, and a hash of what it asks for."""
    if key is None:
        return None
    # YAML has values that JSON has not; two that read the same are the same here.
    content = json.dumps([what, document], sort_keys=True, default=repr)
    return RequestKey(key=key, request_hash=hashlib.sha256(content.encode()).hexdigest())


def _with_measured_constants(document: Any, data_dir: Path | None) -> Any:
    """The document with what is known of its cluster; anything malformed is the reader's to refuse."""
    if data_dir is None or not isinstance(document, Mapping) or "cluster" not in document:
        return document
    try:
        return {**document, "cluster": with_measured_constants(document["cluster"], data_dir)}
    except SearchSpaceError as error:
        raise error.within("cluster") from error
