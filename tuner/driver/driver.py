"""The driver: ask -> trial row, outcome -> tell, for every campaign that runs.

Everything it knows is in the database, so it may be killed at any moment: a layout is known to
nobody before its trial is written, and an outcome is durable before the driver hears of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from results_db.errors import CampaignStateError, DriverLeaseLostError, TrialDuplicateError
from results_db.leases import HEARTBEAT_INTERVAL_S
from results_db.records import CampaignRecord, CampaignState, TrialRecord, TrialSize
from results_db.store import Store
from search_spaces.errors import SearchSpaceError
from tuner.analysis import analyse
from tuner.budget import (
    EndedTrial,
    Spent,
    closing_words,
    is_kept_back,
    time_is_up,
    trials_left,
)
from tuner.campaign_search import CampaignSearch
from tuner.errors import TunerError
from tuner.remeasuring import most_repeats, round_of_repeats
from tuner.supply import Supply

POLL_INTERVAL_S: Final = 0.2
IDLE_INTERVAL_S: Final = 0.5
"""Between two looks when no campaign runs."""
MAX_RETRY_INTERVAL_S: Final = 10.0
MAX_A_ROUND: Final = 16
"""Trials that are asked for before outcomes are looked at again."""
ANALYSIS_INTERVAL_S: Final = 60.0
"""Between two analyses of a campaign that runs; at its end there is another one."""
ENDINGS_AN_ANALYSIS: Final = 5
"""Trials that must have ended since the last."""
LEAST_COMPLETED: Final = 5
"""Completed trials before a campaign may be called converged: what was learnt from fewer is mostly what
was believed beforehand."""

_log: Final = logging.getLogger("tuner.driver")


class Driver:
    """Drives every RUNNING campaign of one database; `tenure` sees to it that there is no second one."""

    def __init__(self, store: Store, *, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._store = store
        self._poll_interval_s = poll_interval_s
        self._searches: dict[int, CampaignSearch] = {}
        self._beat_at = -HEARTBEAT_INTERVAL_S
        self._analysed: dict[int, tuple[int, float]] = {}
        """By campaign, how far it had come when it was last analysed, and when that was."""

    def run(self, wait: Callable[[float], bool]) -> None:
        """Goes round until told to stop; a round that fails is tried again, ever more slowly.

        Ends too when another driver has taken over: what this one knows is out of date then.

        Args:
            wait: pauses for so many seconds, and says whether to stop.
        """
        _log.info("driver started")
        failures = 0
        while not wait(self._pause_s(failures)):
            try:
                ok = self.step()
            except DriverLeaseLostError as error:
                _log.warning("%s", error)
                break
            except Exception:
                # The database may be away for a while; campaigns outlive that.
                _log.exception("this round failed; trying again")
                ok = False
            failures = 0 if ok else failures + 1
        _log.info("driver stopped")

    def step(self) -> bool:
        """Goes round every campaign once.

        Returns:
            Whether all went well; what did not has been logged, and is to be tried again.
        """
        self._beat()
        campaigns = self._store.campaigns_to_drive()
        self._set_aside({campaign.id for campaign in campaigns})
        results = [self._step_campaign(campaign) for campaign in campaigns]
        return all(results)

    def _pause_s(self, failures: int) -> float:
        if failures:
            return float(
                min(self._poll_interval_s * 2.0 ** min(failures, 10), MAX_RETRY_INTERVAL_S)
            )
        return self._poll_interval_s if self._searches else IDLE_INTERVAL_S

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_INTERVAL_S:
            self._store.agree_on_time()
            self._store.move_clocks()
            self._beat_at = now

    def _set_aside(self, running: set[int]) -> None:
        """Forgets the searches of campaigns that were paused, cancelled or have ended."""
        for campaign_id in set(self._searches) - running:
            search = self._searches.pop(campaign_id)
            _log.info("campaign %r no longer runs: set aside", search.spec.name)

    def _step_campaign(self, campaign: CampaignRecord) -> bool:
        try:
            self._drive(campaign)
        except DriverLeaseLostError:
            raise
        except (TunerError, SearchSpaceError) as error:
            _log.exception("campaign %r is broken", campaign.name)
            return self._fail(campaign, error)
        except (CampaignStateError, TrialDuplicateError) as error:
            # The user was quicker, or somebody else added the trial: start over from the database.
            _log.info("campaign %r: %s", campaign.name, error)
            self._searches.pop(campaign.id, None)
        except Exception:
            # What a search had asked for may not have been written: it is rebuilt.
            _log.exception("campaign %r: this round failed; trying again", campaign.name)
            self._searches.pop(campaign.id, None)
            return False
        return True

    def _fail(self, campaign: CampaignRecord, error: Exception) -> bool:
        self._searches.pop(campaign.id, None)
        try:
            self._end(campaign, "FAILED", "error", str(error))
        except CampaignStateError as state_error:
            _log.info("campaign %r: %s", campaign.name, state_error)
        except DriverLeaseLostError:
            raise
        except Exception:
            _log.exception("campaign %r cannot be ended; trying again", campaign.name)
            return False
        return True

    def _drive(self, campaign: CampaignRecord) -> None:
        # Counted before the outcomes are read: what has ended by now is told before the next ask.
        counts = self._store.count_trials(campaign.id)
        supply = self._supply(campaign)
        search = self._search(campaign)
        for trial in self._store.trials_told_since(campaign.id, search.last_ended_seq):
            search.tell(trial)
            _log_ending(campaign, search, trial)
        spent = Spent(
            trials=sum(counts.values()) - counts["CANCELLED"],
            node_seconds=campaign.node_seconds,
            wall_time_s=campaign.wall_time_s,
        )
        if self._analysis_is_due(campaign, search):
            self._analyse(campaign)
        ending = time_is_up(search.spec.budget, spent)
        if ending is not None:
            self._wind_up(campaign, ending)
        else:
            num_open = counts["PENDING"] + counts["RUNNING"]
            self._go_on(campaign, search, spent, supply, num_open=num_open)

    def _wind_up(self, campaign: CampaignRecord, ending: str) -> None:
        """Time is up: what waits is cancelled, what runs may finish, then the campaign ends."""
        budget = campaign.spec["budget"]
        num_cancelled = self._store.cancel_pending(campaign.id, ending, budget=budget)
        # Counted afterwards: a worker may have taken a trial just before.
        num_running = self._store.count_open_trials(campaign.id)
        if num_running == 0:
            self._complete(campaign, "budget", ending)
        elif num_cancelled:
            _log.info("campaign %r: %s; %d trials finish", campaign.name, ending, num_running)

    def _go_on(
        self,
        campaign: CampaignRecord,
        search: CampaignSearch,
        spent: Spent,
        supply: Supply,
        *,
        num_open: int,
    ) -> None:
        """Keeps the workers supplied; ends the campaign when nothing is left to try."""
        left = trials_left(search.spec.budget, spent)
        most = MAX_A_ROUND if left is None else min(MAX_A_ROUND, left)
        num_repeats = self._repeat_doubtful(campaign, supply, most)
        most -= num_repeats
        settings = search.spec.stop
        converged = self._converged(campaign, search)
        kept_back = is_kept_back(search.spec.budget, spent, most_repeats(settings.remeasure))
        added = False
        if converged is None and not kept_back:
            added = self._add_trials(campaign, search, supply, most)
        if num_open or num_repeats or added or self._remeasure(campaign, search, left):
            return
        if converged is not None:
            self._complete(campaign, "converged", converged)
        elif kept_back and self._add_trials(campaign, search, supply, most):
            return  # The best stands alone: the search has the rest.
        elif left == 0:
            ending = f"{spent.trials} of {search.spec.budget.trials} trials done"
            self._complete(campaign, "budget", ending)
        else:
            ending = f"all {search.num_layouts} legal layouts were tried"
            self._complete(campaign, "exhausted", ending)

    def _converged(self, campaign: CampaignRecord, search: CampaignSearch) -> str | None:
        """Why nothing more is asked for though there is something; None: the search goes on."""
        share = search.spec.stop.converged_within
        if share is None:
            return None
        num_completed = self._store.count_trials(campaign.id)["COMPLETED"]
        if num_completed < LEAST_COMPLETED:
            return None
        expected = search.expected_improvement()
        if expected is None or expected >= share:
            return None
        return (
            f"what is left is expected to improve the best by {expected:.2%}, less than the "
            f"{share:g} of stop.converged_within, after {num_completed} completed trials"
        )

    def _remeasure(self, campaign: CampaignRecord, search: CampaignSearch, left: int | None) -> int:
        """Measures the best once more, those that cannot be told apart; says how many.

        What was repeated is read from the database: a driver that died in between repeats nothing twice.
        """
        num_layouts = search.spec.stop.remeasure
        if not num_layouts or left == 0:
            return 0
        best = self._store.standings(campaign.id, campaign.objective, limit=num_layouts)
        repeats = self._store.count_repeats(campaign.id)
        again = round_of_repeats(best, repeats, left=left)
        for standing in again:
            trial = self._store.repeat_trial(standing.trial.id)
            _log.info(
                "campaign %r: trial %d measures %s again, one of %d that may be the best",
                campaign.name,
                trial.number,
                trial.layout_key,
                len(again),
            )
        return len(again)

    def _supply(self, campaign: CampaignRecord) -> Supply:
        workers = self._store.workers(cluster=campaign.cluster_name)
        return Supply(workers, self._store.open_trial_sizes(campaign.id))

    def _search(self, campaign: CampaignRecord) -> CampaignSearch:
        search = self._searches.get(campaign.id)
        if search is None:
            trials = self._store.trials(campaign.id)
            known = self._store.known_trials(campaign)
            search = CampaignSearch.rebuild(campaign, trials, known)
            self._searches[campaign.id] = search
            _log.info(
                "campaign %r taken up: strategy %s, %d legal layouts, %d trials so far, starting from "
                "%d of other campaigns",
                campaign.name,
                search.spec.strategy,
                search.num_layouts,
                len(trials),
                len(known),
            )
        search.take_budget(campaign)
        return search

    def _repeat_doubtful(self, campaign: CampaignRecord, supply: Supply, most: int) -> int:
        """Measures trials again whose losses contradict each other; says how many."""
        doubtful = self._store.trials_in_doubt(campaign.id) if supply.is_short else []
        repeated = 0
        for trial_id in doubtful[:most]:
            if not supply.is_short:
                break
            trial = self._store.repeat_trial(trial_id)
            supply.add(_size(trial))
            repeated += 1
            _log.info(
                "campaign %r: trial %d repeats %s", campaign.name, trial.number, trial.layout_key
            )
        return repeated

    def _add_trials(
        self, campaign: CampaignRecord, search: CampaignSearch, supply: Supply, most: int
    ) -> bool:
        """Writes the new trials that are missing, and says whether there was any."""
        added = 0
        while added < most and supply.is_short:
            layout = search.ask()
            if layout is None:
                break
            trial = self._store.add_trial(campaign.id, layout)
            _log.info("campaign %r: trial %d is %s", campaign.name, trial.number, layout.key)
            supply.add(_size(trial))
            added += 1
        return added > 0

    def _analysis_is_due(self, campaign: CampaignRecord, search: CampaignSearch) -> bool:
        seq, at = self._analysed.setdefault(campaign.id, (0, time.monotonic()))
        is_early = time.monotonic() - at < ANALYSIS_INTERVAL_S
        return not is_early and search.last_ended_seq - seq >= ENDINGS_AN_ANALYSIS

    def _analyse(self, campaign: CampaignRecord) -> None:
        """Works out which knobs matter and keeps it; where that fails the campaign goes on without."""
        try:
            standings = self._store.standings(campaign.id, campaign.objective)
            analysis = analyse(campaign, standings, self._store.trials(campaign.id))
            if analysis is not None:
                self._store.keep_analysis(campaign.id, analysis)
        except DriverLeaseLostError:
            raise
        except Exception:
            # It is a remark on the campaign; what it remarks on is kept, and worth more.
            _log.exception("campaign %r cannot be analysed", campaign.name)
        seq = 0 if (search := self._searches.get(campaign.id)) is None else search.last_ended_seq
        self._analysed[campaign.id] = (seq, time.monotonic())

    def _complete(self, campaign: CampaignRecord, reason: str, ending: str) -> None:
        self._analyse(campaign)
        trials = self._store.trials(campaign.id)
        message = closing_words(
            ending, [EndedTrial(state=trial.state, reason=trial.reason) for trial in trials]
        )
        # A budget that was raised while this round looked at the old one must not be lost.
        budget = campaign.spec["budget"]
        self._end(campaign, "COMPLETED", reason, message, budget=budget)

    def _end(
        self,
        campaign: CampaignRecord,
        state: CampaignState,
        reason: str,
        message: str,
        *,
        budget: Mapping[str, Any] | None = None,
    ) -> None:
        self._store.end_campaign(campaign.id, state, reason, message, budget=budget)
        self._searches.pop(campaign.id, None)
        self._analysed.pop(campaign.id, None)
        _log.info("campaign %r is %s (%s): %s", campaign.name, state, reason, message)


def _log_ending(campaign: CampaignRecord, search: CampaignSearch, trial: TrialRecord) -> None:
    value = trial.objective(search.spec.objective)
    if value is None or trial.state != "COMPLETED":
        what = f"{trial.reason}: {trial.message}"
    else:
        what = f"{search.spec.objective} {value:.4g}"
    _log.info("campaign %r: trial %d %s, %s", campaign.name, trial.number, trial.state, what)


def _size(trial: TrialRecord) -> TrialSize:
    layout = trial.layout
    return TrialSize(num_nodes=layout.num_nodes, num_devices=layout.num_devices, is_waiting=True)
