"""Small seeded faults, each a replacement inside one function.

They measure how many plausible mistakes the test suites catch. They were written without knowledge
of the tests. A fault is found by the name of its function, so that it stays applicable when the
function moves to another module; when a function is renamed or rewritten, adapt the fault and keep
its meaning.
"""

from __future__ import annotations

from typing import Final

from tests.seeded_faults.fault import Fault
from tests.seeded_faults.job_knobs import JOB_KNOBS
from tests.seeded_faults.other_trainers import OTHER_TRAINERS, PLANS_AND_CLIENT, TABLES_AND_SLURM

SEARCH_SPACES: Final = (
    Fault(
        name="derived-dp-leaves-devices-idle",
        function="_world_is_wrong",
        before="must_fill = (c.num_nodes > 1) | x.fill_nodes",
        after="must_fill = c.num_nodes > 1",
        what="A layout of one node whose derived dp leaves devices unused counts as legal.",
    ),
    Fault(
        name="illegal-layout-has-a-position",
        function="LegalSet.index_of",
        before="if position == len(self) or self.layout(position) != layout:",
        after="if position == len(self):",
        what="An illegal layout gets the position of the next legal one.",
    ),
    Fault(
        name="exclusions-counted-before-broadcast",
        function="enumerate_legal",
        before="int(np.count_nonzero(broken)) * (illegal.size // broken.size)",
        after="int(np.count_nonzero(broken))",
        what="A rule's count of excluded combinations ignores the axes that the rule does not read.",
    ),
    Fault(
        name="tied-embedding-copy-is-free",
        function="stage_parameters",
        before="owns_output = last & ((columns.pp > 1) | (not model.tied_embeddings))",
        after="owns_output = last & (not model.tied_embeddings)",
        what="The memory estimate omits the last stage's copy of a tied embedding.",
    ),
    Fault(
        name="replicas-reduce-the-whole-buffer",
        function="_sum_terms",
        before="(z - 1.0) / z + 2.0 * (copies - 1.0) / d",
        after="(z - 1.0) / z + 2.0 * (copies - 1.0) / copies",
        what="The time estimate lets ZeRO replicas all-reduce all gradients instead of one shard.",
    ),
    Fault(
        name="a-median-is-as-sure-as-a-mean",
        function="variance_factor",
        before="MEDIAN_VARIANCE if num_runs > 2 else 1.0",
        after="1.0",
        what="The median of many runs counts as sure as their mean.",
    ),
    Fault(
        name="loss-tolerance-grows-late",
        function="loss_tolerance",
        before="index - STEADY_ITERATIONS + 1",
        after="index - STEADY_ITERATIONS",
        what="The tolerance of losses begins to grow one iteration too late.",
    ),
    Fault(
        name="true-reads-as-one",
        function="whole_number_problem",
        before="if isinstance(value, bool) or not isinstance(value, int):",
        after="if not isinstance(value, int):",
        what="A document may write `true` where a whole number is expected.",
    ),
    Fault(
        name="out-of-memory-repeat-reads-as-failed",
        function="_merge",
        before="return (out_of_memory or repeats)[0]",
        after="return repeats[0]",
        what="A layout that failed first and ran out of memory later is merged into a failed row.",
        also="out_of_memory",
    ),
)

RESULTS_DB: Final = (
    Fault(
        name="another-outcome-answered-as-kept",
        function="OutcomeBatch._take",
        before='return "" if digest == attempt.outcome_digest else _ANOTHER',
        after='return ""',
        what="A second, different outcome of an attempt is answered as if it counted.",
    ),
    Fault(
        name="newest-trial-leased-first",
        function="LeaseBatch.hand_out",
        before="self._lock_next(kind, num_asked)[::-1]",
        after="self._lock_next(kind, num_asked)",
        what="A batch of waiting trials is handed out from the newest to the oldest.",
    ),
    Fault(
        name="an-owner-who-got-trials-comes-first",
        function="OwnerTurns.order",
        before="(has + more, next(turn), place, owner)",
        after="(has - more, next(turn), place, owner)",
        what="The owner whose trials were just handed out gets the next turn too.",
    ),
    Fault(
        name="a-reported-quarantine-counts-for-all-workers",
        function="scope_of",
        before="worker.id if worker.launcher == SIMULATED_LAUNCHER else worker.registered_by",
        after="''",
        what="A node that one worker reports as faulty is set aside for workers of every token.",
    ),
    Fault(
        name="a-large-search-is-opened-without-a-worker",
        function="OpenSearches._due",
        before="self._unserved.add(campaign.id)",
        after="due.append(campaign)",
        what="A search of millions of layouts is opened although no worker could run its trials.",
    ),
    Fault(
        name="absurd-step-times-calibrate",
        function="plausible_samples",
        before="~((times < LEAST_RATIO) | (times > MOST_TIMES))",
        after="~(times > MOST_TIMES)",
        what="A step time that is far shorter than any device allows calibrates predictions.",
    ),
    Fault(
        name="late-outcome-stays-lost",
        function="OutcomeBatch._end_attempt",
        before='was_lost = attempt.ending == "lost" attempt.ending = "reported"',
        after='attempt.ending = "reported"; was_lost = attempt.ending == "lost"',
        what="An attempt that was lost and reports late still counts as lost.",
    ),
    Fault(
        name="pooled-rate-scales-with-time",
        function="_pooled_objectives",
        before="known[0] / times_longer",
        after="known[0] * times_longer",
        what="The rate of a repeated layout grows with the median step time in the Pareto front.",
    ),
    Fault(
        name="within-percent-of-the-wrong-base",
        function="_passing",
        before="board.layouts[0].value * (1.0 - listing.within_percent / 100.0)",
        after="board.layouts[0].value / (1.0 + listing.within_percent / 100.0)",
        what="The percentage below the best is taken of the listed value, not of the best.",
        also="within_percent",
    ),
    Fault(
        name="every-run-votes",
        function="vote",
        before="votes = Counter(steady.values())",
        after="votes = Counter(run.same_losses_as for run in runs if run.layout_key in steady)",
        what="Every run has a vote on the right losses, instead of every layout.",
    ),
    Fault(
        name="imported-repeat-of-the-last-run",
        function="_add_trials",
        before="first_number.setdefault(key, number)",
        after="first_number[key] = number",
        what="An imported repeat refers to the run before it instead of the first run.",
    ),
    Fault(
        name="token-use-noted-once",
        function="Access.note_tokens_used",
        before="TokenRow.last_used_at < now - USE_NOTED_EVERY",
        after="TokenRow.last_used_at > now - USE_NOTED_EVERY",
        what="The last use of a token that was idle for more than a minute is never updated.",
    ),
    Fault(
        name="iterations-pruned-by-creation",
        function="Pruning._prune_iterations",
        before="Campaign.ended_at < before",
        after="Campaign.created_at < before",
        what="Pruning deletes iterations of old campaigns that still run.",
    ),
    Fault(
        name="backup-readable-by-others",
        function="new_file",
        before="0o600",
        after="0o644",
        what="Every user of the machine can read a backup, which holds hashes of tokens.",
    ),
    Fault(
        name="newest-event-of-a-campaign-pruned",
        function="EventLog._old_events",
        before="newer.campaign_id == EventRow.campaign_id, newer.seq > EventRow.seq",
        after="newer.seq > EventRow.seq",
        what="Pruning keeps the newest event of all, instead of the newest of each campaign.",
    ),
    Fault(
        name="leaderboard-kept-for-ever",
        function="LeaderboardMemo.get",
        before="if seq != last_ended_seq:",
        after="if board is None:",
        what="A leaderboard that was read once is shown although trials have ended since.",
    ),
    Fault(
        name="stopped-runs-are-pooled",
        function="_pooled",
        before="runs = [run for run in runs if not run.shortened] or runs",
        after="runs = list(runs)",
        what="Runs that were stopped early count in the step time of a layout that has full runs.",
        also="objective",
    ),
    Fault(
        name="peak-at-the-limit-breaks-it",
        function="rank_layouts",
        before="run.peak_memory_bytes <= limit",
        after="run.peak_memory_bytes < limit",
        what="A layout whose peak is exactly what the constraint allows is not ranked.",
    ),
    Fault(
        name="stopped-layouts-within-a-share",
        function="_passing",
        before="each.value < least or (each.shortened and board.winner is not None)",
        after="each.value < least",
        what="Layouts that were stopped early are listed among the cheapest near the best.",
    ),
    Fault(
        name="unmeasured-sorts-first",
        function="listed_layouts",
        before="[each for _, each in known] + [each for value, each in keyed if value is None]",
        after="[each for value, each in keyed if value is None] + [each for _, each in known]",
        what="Layouts that lack the figure they are sorted by come first.",
    ),
    Fault(
        name="driver-writes-after-a-takeover",
        function="Store.as_driver",
        before="self._copy(fenced(self._db, fence), self._actor)",
        after="self._copy(self._db, self._actor)",
        what="A driver whose lease another has taken over can still write.",
    ),
)

TUNER: Final = (
    Fault(
        name="cancelled-trials-spend-the-budget",
        function="Driver._drive",
        before='trials=sum(counts.values()) - counts["CANCELLED"]',
        after="trials=sum(counts.values())",
        what="Cancelled trials count towards the budget of trials.",
    ),
    Fault(
        name="lost-node-blamed-on-the-layout",
        function="observe",
        before="return None if trial.reason in NOT_OF_THE_LAYOUT else FAILED",
        after="return FAILED",
        what="The search learns from a lost node that the layout fails.",
    ),
    Fault(
        name="pending-layouts-ignored",
        function="GuidedProposer.weigh",
        before="pending_SP.max(axis=1, initial=-np.inf)[:, None]",
        after="-np.inf",
        what="The guided search weighs candidates without the results that are still pending.",
    ),
    Fault(
        name="misfit-deviation-used-as-variance",
        function="fit",
        before="np.diag(misfit**2 / weights)",
        after="np.diag(misfit / weights)",
        what="The calibration of step times takes the misfit's standard deviation as its variance.",
        also="_misfit",
    ),
    Fault(
        name="reserve-begins-a-trial-late",
        function="is_reserved",
        before="spent.trials >= budget.trials - num_reserved",
        after="spent.trials > budget.trials - num_reserved",
        what="The search takes one trial of the reserve for measuring the best again.",
    ),
)

WORKERS: Final = (
    Fault(
        name="backfill-by-expected-time",
        function="Packer._borrow",
        before="now_s + request.at_most_s",
        after="now_s + (request.expected_s or request.at_most_s)",
        what="A probe borrows reserved devices that it may hold beyond the start of the reservation.",
    ),
    Fault(
        name="stranger-suspected",
        function="NodeHistory.failed",
        before="{outcome.node} if outcome.node in nodes else set(nodes)",
        after="{outcome.node} if outcome.node else set(nodes)",
        what="A failure that names a node outside of the probe's nodes clears all of them.",
    ),
    Fault(
        name="posted-outcome-posted-again",
        function="Outbox._post",
        before="self._drop(outcome)",
        after="pass",
        what="An outcome that the service has taken is posted again and again.",
    ),
    Fault(
        name="signal-exits-below-128",
        function="watch",
        before="return code if code >= 0 else 128 - code",
        after="return code if code >= 0 else 128 + code",
        what="The warden's exit code for a command killed by a signal is 128 minus the signal.",
        also="become_subreaper",
    ),
    Fault(
        name="slow-leak-becomes-the-baseline",
        function="MemoryWatch._take",
        before="min(used_bytes, self._idle_bytes.get(name, used_bytes))",
        after="used_bytes",
        what="Device memory that is lost little by little raises the idle baseline.",
    ),
    Fault(
        name="upper-case-proxies-survive",
        function="_worker_environment",
        before='("-u", name, "-u", name.upper())',
        after='("-u", name)',
        what="The batch script leaves HTTP_PROXY and its like in the worker's environment.",
    ),
    Fault(
        name="orders-to-ranks-are-lost",
        function="RankReports.tell",
        before="line.send(document)",
        after="continue",
        what="What the worker tells the ranks of a group, as to stop early, reaches none of them.",
    ),
    Fault(
        name="unsaved-outcome-dropped",
        function="Outbox.keep",
        before="self._unsaved.add(_key(outcome))",
        after="return None",
        what="An outcome that the disk does not take is lost although the service answers.",
    ),
)

TRAINER: Final = (
    Fault(
        name="warm-up-one-pass-longer",
        function="_one_forward_one_backward",
        before="min(pp - 1 - stage, num_microbatches)",
        after="min(pp - stage, num_microbatches)",
        what="Each stage of 1F1B runs one more forward pass before its first backward pass.",
    ),
    Fault(
        name="positions-start-at-zero",
        function="Embedding.forward",
        before="self.tp_rank * x_TH.shape[0]",
        after="0",
        what="With sequence parallelism every rank adds the positions of the first tokens.",
    ),
    Fault(
        name="every-replica-counts-the-norm",
        function="FlatOptimizer._counted",
        before="self.spans[bucket].share(copies.num_replicas, copies.replica_rank)",
        after="self.spans[bucket]",
        what="Replicas of the same gradients each add them to the global norm.",
    ),
    Fault(
        name="returned-rows-are-not-put-back",
        function="RowExchange.start_to_tokens",
        before="index_copy_(0, self._order_R, each_R)",
        after="copy_(each_R)",
        what="Outputs of experts go back in the order of experts, not in that of the ranks.",
    ),
    Fault(
        name="gradients-stay-scaled",
        function="FlatOptimizer.divisor",
        before="(grad_norm / limit if clips and limit else 1.0) * self.loss_scale",
        after="grad_norm / limit if clips and limit else 1.0",
        what="The update in fp16 uses gradients that are still multiplied by the loss scale.",
    ),
    Fault(
        name="checkpoint-counts-samples-by-steps",
        function="JobCheckpoints._record",
        before="samples=self._first_sample + taken",
        after="samples=step * job.layout.global_batch_size",
        what="After a job resumed with another global batch, its checkpoints hold wrong sample counts.",
    ),
)

CONNECTION: Final = (
    Fault(
        name="pause-that-was-asked-for-ignored",
        function="Retries.of_request",
        before="return max(self.pause_s(failed.attempt_number), asked_s)",
        after="return self.pause_s(failed.attempt_number)",
        what="A request is sent again before the pause that the service asks for is over.",
    ),
    Fault(
        name="outage-ended-by-another-part",
        function="OutageLog.worked",
        before="if self._began_at is None or part not in self._parts:",
        after="if self._began_at is None:",
        what="A part that never failed ends the outage of another part in the log.",
    ),
)

API: Final = (
    Fault(
        name="one-rate-limit-a-role",
        function="AccessCheck._checked",
        before=".take(holder.token_id or holder.name)",
        after=".take(holder.role)",
        what="All tokens of a role share one rate limit.",
    ),
    Fault(
        name="etag-ignores-the-format",
        function="tag_of",
        before="{request.url.query} {request.headers.get('accept', '')}",
        after="{request.url.query}",
        what="A client that has a page as JSON gets 304 when it asks for it as CSV.",
    ),
    Fault(
        name="nothing-missed-reported-as-missed",
        function="EventStream._resume",
        before="return self._after < await",
        after="return self._after <= await",
        what="A watcher that has seen all pruned events is told that it missed some.",
    ),
    Fault(
        name="unrepeatable-call-repeated",
        function="Retries.of_request",
        before="not (status in TEMPORARY and is_repeatable)",
        after="status not in TEMPORARY",
        what="The client sends a call again after 502 to 504 although it may have been executed.",
    ),
)

SHARED: Final = (
    Fault(
        name="timing-ranks-not-seen",
        function="is_timing",
        before="return True",
        after="return False",
        what="The driver and the service do not see that ranks on their machine time iterations.",
    ),
    Fault(
        name="driver-works-beside-timed-iterations",
        function="_drive_once.must_stop",
        before="or wait_while_timing( stop.wait, can_wait=lambda: driver.num_open_trials() >= least )",
        after="",
        what="The driver of `up` makes its rounds on the cores of ranks that time iterations.",
    ),
    Fault(
        name="ranks-count-as-own-processes",
        function="own_processes.is_own",
        before="while pid in parents and pid not in ranks:",
        after="while pid in parents:",
        what="What the ranks themselves ran counts as taken by the product's own processes.",
    ),
    Fault(
        name="own-share-above-what-was-taken",
        function="CoreWatch.take",
        before="self.own_s += min(taken_s, own_ran_s)",
        after="self.own_s += own_ran_s",
        what="The product's own share of a disturbance counts what it ran on free cores, too.",
    ),
    Fault(
        name="last-measured-peak-kept",
        function="GroupLauncher.keep_measured_peak",
        before="max(known, (tflops, source))",
        after="(tflops, source)",
        what="A peak that was measured beside load takes the place of a better one.",
    ),
    Fault(
        name="exceeded-peak-not-measured-again",
        function="ProgramRun.measurement",
        before="if speed.hfu > 1:",
        after="if speed.hfu > 2:",
        what="A program that exceeds a peak that was measured too low is refused.",
    ),
    Fault(
        name="report-file-hides-the-package",
        function="_load_installed_package",
        before="if installed is None or installed.loader is None:",
        after="if installed is not None:",
        what="A program that reports its steps cannot import the installed client.",
    ),
    Fault(
        name="stored-campaign-kept-by-name-alone",
        function="StoredCampaign.read",
        before="if known is not None and known[0] == self.document:",
        after="if known is not None:",
        what="A campaign that is made anew under an old name is read as the old one.",
    ),
    Fault(
        name="predicted-export-planned-for-our-trainer",
        function="_software_of",
        before="format_name if probed_by == EMBEDDED_TRAINER else probed_by",
        after="EMBEDDED_TRAINER",
        what="An export of a plan for another trainer is of the plan for the embedded one.",
        also="format_name",
    ),
    Fault(
        name="ranked-figures-of-one-run",
        function="_metric",
        before="return found * (measured.step_time_s / step_time_s)",
        after="return found",
        what="Figures of a ranked layout are those of one run, not at the median of all runs.",
        also="shown.measurement",
    ),
)

FAULTS: Final = (
    *(*SEARCH_SPACES, *RESULTS_DB, *TUNER, *WORKERS, *TRAINER, *CONNECTION, *API),
    *SHARED,
    *(*OTHER_TRAINERS, *TABLES_AND_SLURM, *PLANS_AND_CLIENT, *JOB_KNOBS),
)
