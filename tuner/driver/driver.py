"""The driver: for every running campaign it writes proposed layouts as trials, and reads outcomes.

All of its state is in the database, so it may be killed at any moment: no worker sees a layout
before its trial is written, and an outcome is stored before the driver reads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from layout_tuner.errors import SearchSpaceError
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.allocations.leases import HEARTBEAT_INTERVAL_S
from layout_tuner.results_db.database.change_mark import OPEN_TRIALS, RUNNING_CAMPAIGN, WAITING_PLAN
from layout_tuner.results_db.errors import (
    CampaignNotFoundError,
    CampaignStateError,
    DriverLeaseLostError,
    TrialDuplicateError,
)
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import (
    CampaignRecord,
    CampaignState,
    RepeatReason,
    TrialRecord,
    TrialSize,
)
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.timing_mark import shares_cores
from layout_tuner.tuner.analysis.analysis import ANALYSIS_INTERVAL_S, ENDINGS_AN_ANALYSIS, analyse
from layout_tuner.tuner.analysis.importance import load
from layout_tuner.tuner.driver.background_work import start_beside
from layout_tuner.tuner.driver.campaign_end import (
    Spent,
    closing_message,
    is_reserved,
    node_seconds_left,
    time_is_up,
    too_little_left,
    trials_left,
    why_converged,
)
from layout_tuner.tuner.driver.campaign_opening import BackgroundOpening
from layout_tuner.tuner.driver.campaign_search import CampaignSearch, full_probe_node_s
from layout_tuner.tuner.driver.open_limits import OpenLimits
from layout_tuner.tuner.driver.open_searches import SMALL_SEARCH, OpenSearches
from layout_tuner.tuner.driver.open_trial_target import OpenTrialTarget
from layout_tuner.tuner.driver.plan_maker import PlanMaker
from layout_tuner.tuner.driver.remeasuring import (
    NO_REPEATS,
    NUM_ROUNDS,
    disturbed_layouts,
    most_doubted,
    round_of_repeats,
    wait_until_quieter,
)
from layout_tuner.tuner.driver.round_order import in_turns
from layout_tuner.tuner.errors import TunerError
from layout_tuner.tuner.strategies.ask_and_tell import AskLimits

POLL_INTERVAL_S: Final = 0.2
IDLE_INTERVAL_S: Final = 0.5
"""Pause between two rounds while no campaign runs."""
UNCHANGED_INTERVAL_S: Final = 1.0
"""Pause while nothing is stored; what time alone decides, such as a spent budget, waits for it."""
MAX_RETRY_INTERVAL_S: Final = 10.0
MAX_A_ROUND: Final = 16
"""New trials of a campaign in one round; outcomes are read between rounds."""
_LOOKED_AT: Final = 100
"""Of the ranked layouts, the best so many may be repeated because they were disturbed."""

_log: Final = logging.getLogger("layout_tuner.tuner.driver.driver")


class Driver:
    """Drives every RUNNING campaign of a database; only one driver holds the driver lease."""

    def __init__(
        self,
        store: Store,
        *,
        opening: BackgroundOpening | None = None,
        limits: OpenLimits | None = None,
    ) -> None:
        """Starts without any search; without an `opening`, rounds open searches at once."""
        self._store = store
        self._plans = PlanMaker(store)
        self._searches = OpenSearches(store, opening, limits)
        self._beat_at = -HEARTBEAT_INTERVAL_S
        self._mark = store.change_mark()
        self._found_some = True
        """Whether the last round found a campaign."""
        self._succeeded_at: float | None = None
        """When the last round ended, by the monotonic clock, if no campaign of it failed."""
        self._analysed: dict[int, tuple[int, float]] = {}
        """The last analysis of each campaign: `last_ended_seq` and the time by the monotonic
        clock."""
        self._loading: Future[None] | None = None
        """The imports of the analysis, once they have been started beside the rounds."""
        self._outages: dict[int, OutageLog] = {}
        """The failing rounds of each campaign."""

    def run(self, wait: Callable[[float], bool]) -> None:
        """Repeats `step` until it must stop; after a failed round it pauses, longer each time.

        `wait` pauses and returns whether to stop. The driver also stops when another one has taken
        over, because its state is then out of date.
        """
        _log.info("driver started")
        outage = OutageLog(_log, "the driver's round")
        failures = 0
        while not wait(self._pause_s(failures)):
            try:
                ok = self.step()
            except DriverLeaseLostError as error:
                _log.warning("%s", error)
                break
            except Exception as error:
                # The database may be away for a while; the campaigns go on afterwards.
                outage.failed("this round failed", error)
                ok = False
            else:
                outage.worked()
            failures = 0 if ok else failures + 1
        self.close()
        _log.info("driver stopped")

    def close(self) -> None:
        """Closes its own connection, which would keep SQLite from emptying the write-ahead log."""
        if self._mark is not None:
            self._mark.close()

    def step(self) -> bool:
        """Drives every running campaign once.

        Returns:
            Whether all succeeded. What failed was logged and is tried again in the next round.
        """
        if self._is_idle() or self._is_unchanged():
            return True
        self._succeeded_at = None
        self._beat()
        self._plans.step()
        campaigns = self._store.campaigns.to_drive()
        self._found_some = bool(campaigns)
        running = {campaign.id for campaign in campaigns}
        self._outages = {key: log for key, log in self._outages.items() if key in running}
        self._searches.keep_only(running)
        self._searches.give_turns(campaigns)
        succeeded: dict[int, bool] = {}
        for campaign in in_turns(campaigns):
            if campaign.id not in succeeded:
                succeeded[campaign.id] = self._step_campaign(campaign)
            elif succeeded[campaign.id]:
                succeeded[campaign.id] = self._step_again(campaign)
        ok = all(succeeded.values())
        if ok and not self._searches.is_opening:
            self._succeeded_at = time.monotonic()
        return ok

    def _is_unchanged(self) -> bool:
        """Whether the last round succeeded a moment ago, and nothing was stored since.

        On one machine a round takes the probes' cores some milliseconds, several times a second.
        """
        changed = self._mark is None or self._mark.has_changed()
        at = self._succeeded_at
        return not changed and at is not None and time.monotonic() - at < UNCHANGED_INTERVAL_S

    def num_open_trials(self) -> int:
        """Trials that wait or run; 0 on PostgreSQL, which is not asked."""
        return 0 if self._mark is None else self._mark.count(OPEN_TRIALS)

    def _is_idle(self) -> bool:
        """Whether no campaign runs, as in the last round, and no plan waits.

        It is known without a transaction.
        """
        if self._found_some or self._mark is None:
            return False
        return not (self._mark.finds(RUNNING_CAMPAIGN) or self._mark.finds(WAITING_PLAN))

    def _pause_s(self, failures: int) -> float:
        if failures:
            return float(min(POLL_INTERVAL_S * 2.0 ** min(failures, 10), MAX_RETRY_INTERVAL_S))
        return POLL_INTERVAL_S if self._searches.num_places else IDLE_INTERVAL_S

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_INTERVAL_S:
            self._store.agree_on_time()
            self._store.driver.move_clocks()
            self._beat_at = now

    def _step_campaign(self, campaign: CampaignRecord) -> bool:
        try:
            is_open = self._drive(campaign)
        except DriverLeaseLostError:
            raise
        except Exception as error:
            return self._is_gone(campaign) or self._handle(error, campaign)
        if not is_open:
            # A search that is being opened does not show that an earlier failure is over.
            return campaign.id not in self._outages
        self._searches.worked(campaign.id)
        if (outage := self._outages.get(campaign.id)) is not None:
            outage.worked()
        return True

    def _step_again(self, campaign: CampaignRecord) -> bool:
        """Drives a campaign a second time in a round, if its search is open and it still runs."""
        if self._searches.get(campaign.id) is None:
            return True
        try:
            now = self._store.campaigns.get(campaign.id)
        except CampaignNotFoundError:
            return True  # the next round drops its search
        return now.state != "RUNNING" or self._step_campaign(now)

    def _is_gone(self, campaign: CampaignRecord) -> bool:
        """Whether the campaign was deleted meanwhile; its failure then needs no handling."""
        try:
            self._store.campaigns.get(campaign.id)
        except CampaignNotFoundError:
            self._forget(campaign)
            _log.info("campaign %r was deleted", campaign.name)
            return True
        except DriverLeaseLostError:
            raise
        except Exception:
            # Unknown: the first failure is handled and logged.
            return False
        return False

    def _handle(self, error: Exception, campaign: CampaignRecord) -> bool:
        """Handles the failure of a campaign's round; returns False if it has to be tried again."""
        if isinstance(error, MemoryError):
            self._searches.pause(campaign)
            return True
        self._searches.close(campaign.id)
        if isinstance(error, (TunerError, SearchSpaceError)):
            _log.error("campaign %r is broken", campaign.name, exc_info=error)
            return self._fail(campaign, error)
        if isinstance(error, (CampaignStateError, TrialDuplicateError)):
            # The user changed the campaign or added the trial meanwhile: read the database again.
            _log.info("campaign %r: %s", campaign.name, error)
            return True
        # A layout that the search proposed may not have been written, so the search is rebuilt.
        self._outage(campaign).failed(f"campaign {campaign.name!r}: this round failed", error)
        return False

    def _forget(self, campaign: CampaignRecord) -> None:
        self._searches.close(campaign.id)
        self._analysed.pop(campaign.id, None)
        self._outages.pop(campaign.id, None)

    def _outage(self, campaign: CampaignRecord) -> OutageLog:
        new = OutageLog(_log, f"campaign {campaign.name!r}")
        return self._outages.setdefault(campaign.id, new)

    def _fail(self, campaign: CampaignRecord, error: Exception) -> bool:
        try:
            self._end(campaign, "FAILED", "error", str(error))
        except CampaignStateError as state_error:
            _log.info("campaign %r: %s", campaign.name, state_error)
        except DriverLeaseLostError:
            raise
        except Exception as reason:
            if self._is_gone(campaign):
                return True
            self._outage(campaign).failed(f"campaign {campaign.name!r} cannot be ended", reason)
            return False
        return True

    def _drive(self, campaign: CampaignRecord) -> bool:
        """Drives one campaign; returns False while its search is not open."""
        search = self._searches.take(campaign)
        self._note_waiting(campaign)
        # Counted before the outcomes are read: the strategy gets all of them before the next ask.
        counts = self._store.campaigns.count_trials(campaign.id)
        spent = Spent(
            trials=sum(counts.values()) - counts["CANCELLED"],
            node_seconds=campaign.node_seconds,
            wall_time_s=campaign.wall_time_s,
        )
        ending = time_is_up(campaign.stored.budget, spent)
        if search is None:
            if ending is not None:
                self._wind_up(campaign, ending)
            return False
        there = self._store.workers.find(cluster=campaign.cluster_name)
        workers = [worker for worker in there if worker.runs(campaign.trainer)]
        target = OpenTrialTarget(workers, self._store.trials.open_sizes(campaign.id))
        for trial in self._store.trials.ended_since(campaign.id, search.last_ended_seq):
            search.tell(trial)
            _log_ending(campaign, search, trial)
        if search.spec.uses_cheap_probes:
            full = self._store.trials.ended_probes(campaign.id, cheap=False)
            spent = replace(spent, full_trials=full.number, full_node_seconds=full.node_seconds)
        if self._analysis_is_due(campaign, search):
            self._analyse(campaign)
        if ending is not None:
            self._wind_up(campaign, ending)
        else:
            num_open = counts["PENDING"] + counts["RUNNING"]
            self._go_on(campaign, search, spent, target, num_open=num_open)
        return True

    def _note_waiting(self, campaign: CampaignRecord) -> None:
        """Stores why the search of a campaign is not open, for the campaign's progress."""
        why = self._searches.why_waiting(campaign)
        if why != campaign.waiting_because:
            self._store.campaigns.note_waiting(campaign.id, why)

    def _wind_up(self, campaign: CampaignRecord, ending: str) -> None:
        """Cancels waiting trials, lets running ones finish, and then ends the campaign."""
        budget = campaign.stored.budget
        num_cancelled = self._store.campaigns.cancel_pending(campaign.id, ending, budget=budget)
        # Counted after the cancellation: a worker may have leased a trial just before.
        num_running = self._store.trials.count_open(campaign.id)
        if num_running == 0:
            self._complete(campaign, "budget", ending)
        elif num_cancelled:
            _log.info("campaign %r: %s; %d trials finish", campaign.name, ending, num_running)

    def _go_on(
        self,
        campaign: CampaignRecord,
        search: CampaignSearch,
        spent: Spent,
        target: OpenTrialTarget,
        *,
        num_open: int,
    ) -> None:
        """Adds the trials that the workers need; ends the campaign when nothing is left to try."""
        left = trials_left(search.spec.budget, spent)
        most = MAX_A_ROUND if left is None else min(MAX_A_ROUND, left)
        num_repeats = self._repeat_doubtful(campaign, search, target, most)
        most -= num_repeats
        settings = search.spec.stop
        converged = why_converged(self._store, campaign.id, search)
        reserved = is_reserved(search.spec.budget, spent, NUM_ROUNDS * settings.remeasure)
        added = False
        if converged is None and not reserved:
            added = self._add_trials(campaign, search, spent, target, most)
        if num_open or num_repeats or added:
            return
        is_searched = converged is None and not reserved
        # Where the budget pays for no full probe, it pays for no repeat of one either.
        if not (is_searched and search.is_held_back and left != 0):
            if self._remeasure(campaign, search, left):
                return
            if is_searched and self._run_all_again(campaign, search, left):
                return
            may_use_reserve = converged is None and reserved  # no layout has to be measured again
            if may_use_reserve and self._add_trials(campaign, search, spent, target, most):
                return
        if converged is not None:
            self._complete(campaign, "converged", converged)
        else:
            self._complete(campaign, *_ending(search, spent, left))

    def _run_all_again(
        self, campaign: CampaignRecord, search: CampaignSearch, left: int | None
    ) -> int:
        """Adds a round of repeats of all measured layouts, up to the campaign's runs of each."""
        if search.spec.runs == 1 or left == 0:
            return 0
        measured = self._store.leaderboard.ranked_layouts(campaign.id, campaign.objective)
        repeats = self._store.trials.count_repeats(campaign.id)
        counts = [repeats.get(each.trial.layout_key, NO_REPEATS).total for each in measured]
        done = min(counts, default=0)
        if done + 1 >= search.spec.runs:
            return 0
        lacking = [each for each, count in zip(measured, counts, strict=True) if count == done]
        again = sorted(lacking, key=lambda each: each.trial.id)[:left]
        for each in again:
            self._store.trials.repeat(each.trial.id, reason="request")
        return len(again)

    def _remeasure(
        self, campaign: CampaignRecord, search: CampaignSearch, left: int | None
    ) -> bool:
        """Adds repeats of the layouts that may be the best; returns whether they are to be awaited.

        Those whose runs were all disturbed come first, and wait until the machine may be quieter.
        The repeats so far are read from the database, so that a restarted driver repeats none
        twice.
        """
        num_layouts = search.spec.stop.remeasure
        if not num_layouts or left == 0:
            return False
        repeats = self._store.trials.count_repeats(campaign.id)
        tied = self._store.leaderboard.tied_layouts(
            campaign.id, campaign.objective, among=_LOOKED_AT
        )
        disturbed = disturbed_layouts(tied, repeats)[:num_layouts][:left]
        for standing in disturbed:
            due_at = wait_until_quieter(standing, repeats)
            if due_at is None or due_at <= self._store.now():
                self._repeat(campaign, standing, "disturbed")
        if disturbed:
            return True
        best = self._store.leaderboard.ranked_layouts(
            campaign.id, campaign.objective, limit=num_layouts
        )
        again = round_of_repeats(best, repeats, left=left)
        for standing in again:
            is_repeated = standing.trial.layout_key in repeats
            self._repeat(campaign, standing, "tie" if is_repeated else "best")
        return bool(again)

    def _repeat(
        self, campaign: CampaignRecord, standing: RankedLayout, reason: RepeatReason
    ) -> None:
        trial = self._store.trials.repeat(standing.trial.id, reason=reason)
        _log.info(
            "campaign %r: trial %d measures %s again (%s)",
            campaign.name,
            trial.number,
            trial.layout_key,
            reason,
        )

    def _repeat_doubtful(
        self, campaign: CampaignRecord, search: CampaignSearch, target: OpenTrialTarget, most: int
    ) -> int:
        """Repeats trials whose losses contradict each other; returns how many."""
        doubtful = self._store.trials.in_doubt(campaign.id) if target.is_short else []
        repeated = 0
        for trial_id in doubtful[:most]:
            if not target.is_short:
                break
            trial = self._store.trials.repeat(trial_id, reason="doubted")
            search.resume(trial)
            target.add(_size(trial))
            repeated += 1
            _log.info(
                "campaign %r: trial %d repeats %s", campaign.name, trial.number, trial.layout_key
            )
        return repeated

    def _add_trials(
        self,
        campaign: CampaignRecord,
        search: CampaignSearch,
        spent: Spent,
        target: OpenTrialTarget,
        most: int,
    ) -> bool:
        """Writes the new trials that the workers need; returns whether there was any."""
        left_node_s = node_seconds_left(search.spec.budget, spent)
        left = trials_left(search.spec.budget, spent)
        is_bounded = left is not None and left <= MAX_A_ROUND
        may_be_doubted = self._may_be_doubted(campaign, search)
        added = 0
        while added < most and target.is_short:
            limits = AskLimits(
                left_node_s=left_node_s,
                is_last=is_bounded and added == most - 1,
                may_doubt=may_be_doubted > 0,
            )
            layout = search.ask(limits)
            if layout is None:
                break
            trial = self._add_trial(campaign, search, layout)
            may_be_doubted -= trial.repeat_reason == "doubted"
            target.add(_size(trial))
            added += 1
        return added > 0

    def _may_be_doubted(self, campaign: CampaignRecord, search: CampaignSearch) -> int:
        """How many more repeats may go to measurements that the strategy doubts."""
        repeats = self._store.trials.count_repeats(campaign.id).values()
        most = most_doubted(search.spec.budget, search.spec.stop.remeasure)
        return most - sum(each.doubted for each in repeats)

    def _add_trial(
        self, campaign: CampaignRecord, search: CampaignSearch, layout: Layout
    ) -> TrialRecord:
        measured = search.measured_by(layout)
        what = ""
        if measured is None:
            said, fidelity = search.predict(layout), search.fidelity(layout)
            trial = self._store.trials.add(campaign.id, layout, fidelity=fidelity, prediction=said)
            if fidelity is not None:
                what = f", a cheap probe: {fidelity.words(layout, search.spec.model)}"
        else:
            trial = self._store.trials.repeat(measured, reason="doubted")
            what = ", again: its measurement is doubted"
        what = ", the baseline" + what if trial.is_baseline else what
        _log.info("campaign %r: trial %d is %s%s", campaign.name, trial.number, layout.key, what)
        return trial

    def _analysis_is_due(self, campaign: CampaignRecord, search: CampaignSearch) -> bool:
        seq, at = self._analysed.setdefault(campaign.id, (0, time.monotonic()))
        is_wanted = search.last_ended_seq - seq >= ENDINGS_AN_ANALYSIS
        if is_wanted and self._loading is None and shares_cores():
            self._loading = start_beside("analysis-imports", load)
        return is_wanted and time.monotonic() - at >= ANALYSIS_INTERVAL_S

    def _analyse(self, campaign: CampaignRecord) -> None:
        """Stores an analysis of the knobs; where that fails, the campaign goes on without it.

        A large campaign whose search is not open keeps its last analysis: enumerating its layouts
        would hold up the others.
        """
        search = self._searches.get(campaign.id)
        if search is None and campaign.num_legal_layouts > SMALL_SEARCH:
            return
        try:
            spec = campaign.stored.spec
            layouts = spec.jobs(spec.legal_set()) if search is None else search.layouts
            standings = self._store.leaderboard.ranked_layouts(campaign.id, campaign.objective)
            trials = self._store.trials.find(campaign.id)
            analysis = analyse(campaign, standings, trials, layouts)
            if analysis is not None:
                self._store.reports.keep_analysis(campaign.id, analysis)
        except DriverLeaseLostError:
            raise
        except Exception as error:
            # The analysis is an addition: its failure must not end the campaign.
            if self._is_gone(campaign):
                return
            if not getattr(error, "is_logged", False):
                _log.exception("campaign %r cannot be analysed", campaign.name)
        seq = 0 if search is None else search.last_ended_seq
        self._analysed[campaign.id] = (seq, time.monotonic())

    def _complete(self, campaign: CampaignRecord, reason: str, ending: str) -> None:
        self._analyse(campaign)
        trials = self._store.trials.find(campaign.id)
        spec = campaign.stored.spec
        message = closing_message(ending, trials, full_probe_node_s=full_probe_node_s(spec, trials))
        # The store refuses if the user has raised the budget since this round read it.
        budget = campaign.stored.budget
        ran = any(trial.started_at is not None for trial in trials)
        state: CampaignState = "COMPLETED" if ran else "FAILED"
        self._end(campaign, state, reason, message, budget=budget)

    def _end(
        self,
        campaign: CampaignRecord,
        state: CampaignState,
        reason: str,
        message: str,
        *,
        budget: Budget | None = None,
    ) -> None:
        self._store.campaigns.end(campaign.id, state, reason, message, budget=budget)
        self._searches.close(campaign.id)
        self._analysed.pop(campaign.id, None)
        _log.info("campaign %r is %s (%s): %s", campaign.name, state, reason, message)


def _ending(search: CampaignSearch, spent: Spent, left: int | None) -> tuple[str, str]:
    """Why a search that did not converge has ended, and the words for it."""
    budget = search.spec.budget
    if left == 0:
        return "budget", f"{spent.trials} of {budget.trials} trials done"
    if search.is_held_back:
        return "budget", too_little_left(budget, spent)
    what = "jobs" if search.spec.space.job else "layouts"
    return "exhausted", f"all {search.num_layouts} legal {what} were tried"


def _log_ending(campaign: CampaignRecord, search: CampaignSearch, trial: TrialRecord) -> None:
    value = trial.objective(search.spec.objective)
    if value is None or trial.state != "COMPLETED":
        what = f"{trial.reason}: {trial.message}"
    else:
        of_part = ", of a part of its layout" if trial.is_cheap else ""
        what = f"{search.spec.objective} {value:.4g}{of_part}"
    _log.info("campaign %r: trial %d %s, %s", campaign.name, trial.number, trial.state, what)


def _size(trial: TrialRecord) -> TrialSize:
    layout = trial.layout
    return TrialSize(num_nodes=layout.num_nodes, num_devices=layout.num_devices, is_waiting=True)
