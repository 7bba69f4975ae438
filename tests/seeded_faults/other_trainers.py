"""Seeded faults about other trainers, their logs, clusters and tables, and about plans of them."""

from __future__ import annotations

from typing import Final

from tests.seeded_faults.fault import Fault

OTHER_TRAINERS: Final = (
    Fault(
        name="host-memory-taken-for-the-devices",
        function="reason_of",
        before='(on_cpu and resource == "host memory")',
        after='resource == "host memory"',
        what="A lack of the host's memory beside GPUs shows that the layout does not fit.",
    ),
    Fault(
        name="first-line-of-a-library-decides",
        function="_most_special",
        before='min(causes, key=lambda cause: cause.resource == "device memory", default=None)',
        after="next(iter(causes), None)",
        what="A library's general line about memory outweighs the one that says for what.",
    ),
    Fault(
        name="hints-count-beside-errors-of-other-kinds",
        function="_of_chain",
        before="if _OTHER_KINDS.match(error.message[0]):",
        after="if _WRAPPER.match(error.message[0]):",
        what="A ValueError whose message only mentions memory is out of memory.",
    ),
    Fault(
        name="host-failures-reach-later-campaigns",
        function="_known",
        before='func.coalesce(Trial.reason, "").not_in(NOT_OF_THE_LAYOUT),',
        after='func.coalesce(Trial.reason, "") != "node_lost",',
        what="A later campaign learns a failed layout from a trial whose host lacked a resource.",
        also="NOT_OF_THE_LAYOUT",
    ),
    Fault(
        name="host-failures-never-pause",
        function="count_host_failure",
        before="campaign.host_failures < MAX_HOST_FAILURES or",
        after="campaign.host_failures > MAX_HOST_FAILURES or",
        what="A campaign goes on for one more trial after three hosts lacked a resource.",
    ),
    Fault(
        name="skipped-steps-are-timed",
        function="ProgramRun._trained",
        before="[step for step in steps if not self._is_skipped[step]]",
        after="[*steps]",
        what="The median step time counts steps that the loss scaler skipped.",
    ),
    Fault(
        name="a-line-is-one-step",
        function="RankSteps.add",
        before="line.num_steps = number - before",
        after="line.num_steps = 1",
        what="A log of every fifth step has five times the step time.",
    ),
    Fault(
        name="repeated-number-is-another-step",
        function="StepLines.take",
        before="more = number - latest if math.isfinite(number - latest) else 1",
        after="more = max(number - latest, 1) if math.isfinite(number - latest) else 1",
        what="A step that several ranks print counts once a rank where steps are bounded.",
    ),
    Fault(
        name="first-rank-to-print-counts",
        function="RankSteps._take_again",
        before="self.lines[place].take(line)",
        after="pass",
        what="Of a step that several ranks print, the first one's figures count, not the slowest's.",
    ),
    Fault(
        name="total-of-skipped-steps-counted-anew",
        function="RankSteps.skipped",
        before='earlier = before.figures.get("skipped_total", 0.0) if before else 0.0',
        after="earlier = 0.0",
        what="A total of skipped steps marks each later line's steps as skipped.",
    ),
    Fault(
        name="rules-of-the-trainer-not-asked",
        function="TrainerAdapter.refusals",
        before="if rule.broken(job.layout, job.model)",
        after="if rule.versions and rule.broken(job.layout, job.model)",
        what="An export ignores the trainer's rules that hold in all of its versions.",
    ),
)

TABLES_AND_SLURM: Final = (
    Fault(
        name="unknown-columns-merged",
        function="TableRow.identity",
        before="variant_of(self.aside)",
        after="()",
        what="Rows that differ in an unknown column are repeats with one median.",
    ),
    Fault(
        name="cluster-line-is-a-job",
        function="squeue_lines",
        before="if line.strip() and not line.startswith(_CLUSTER_LINE)",
        after="if line.strip()",
        what="The line of the cluster that squeue prints under SLURM_CLUSTERS is read as a job.",
    ),
    Fault(
        name="arbitrary-distribution-sorts-hosts",
        function="_host_of_rank_0",
        before='not environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or',
        after='environment.get("SLURM_DISTRIBUTION", "") == "arbitrary" or',
        what="Rank 0 is looked for on the first sorted host under srun's arbitrary distribution.",
    ),
)

PLANS_AND_CLIENT: Final = (
    Fault(
        name="plans-are-of-the-embedded-trainer",
        function="CampaignSpec.software",
        before="software_named(self.probe.trainer)",
        after='software_named("")',
        what="Predictions of a campaign ignore the trainer of its probes.",
    ),
    Fault(
        name="baseline-outside-has-no-rank",
        function="_baseline",
        before="if layout is None:",
        after="if layout is None or legal.index_of(layout) is None:",
        what="A plan says nothing of a baseline that is outside of the space.",
        also="PlannedBaseline",
    ),
    Fault(
        name="baseline-costs-no-trial",
        function="ProbePrices.bounds",
        before="budget.trials - (self.baseline_s is not None)",
        after="budget.trials",
        what="A plan's count of probes leaves out that the baseline takes one trial.",
    ),
    Fault(
        name="needed-probes-end-at-the-deadline",
        function="needed_probes",
        before="node_s = float((prices.asked_s[rows]",
        after="node_s = float((prices.seconds[rows]",
        what="The node-hours of the probes that suffice are cut by the deadline that ends them.",
    ),
    Fault(
        name="exports-never-name-another-trainer",
        function="_trainer_comment",
        before="if trainer == target:",
        after="if trainer != EMBEDDED_TRAINER:",
        what="An export for one trainer says that it is for the other one that was measured.",
    ),
    Fault(
        name="wait-ends-with-the-connection",
        function="CampaignCalls.wait",
        before="self._patiently(lambda: self.campaign(campaign), left_s)",
        after="self.campaign(campaign)",
        what="Waiting for a campaign ends with an error while the service is restarted.",
    ),
    Fault(
        name="events-of-an-ended-campaign-go-on",
        function="_end_of_stream",
        before='end: int | None = opened.get("end")',
        after="end: int | None = None",
        what="A loop over the events of an ended campaign never returns.",
        also="EventsMissedError",
    ),
    Fault(
        name="equal-by-name-alone",
        function="Submission._equal",
        before="if others := found.stored.spec.differences(spec):",
        after="if not (others := [found.name]):",
        what="Submitting a campaign again returns the one of its name although its content differs.",
    ),
)
