"""Seeded faults of job knobs, from their declaration to a trainer's options."""

from __future__ import annotations

from typing import Final

from tests.seeded_faults.fault import Fault

JOB_KNOBS: Final = (
    Fault(
        name="knob-without-its-condition-is-another-job",
        function="JobChoices._settled",
        before="if default is not None and job[name] != default:",
        after="if default is None and job[name] != default:",
        what="A knob keeps its values where its condition does not hold.",
    ),
    Fault(
        name="setting-belongs-to-the-next-layout",
        function="JobSet.layout_rows",
        before='side="right"',
        after='side="left"',
        what="The first job of a layout is taken for one of the layout before.",
    ),
    Fault(
        name="knob-scales-the-whole-step",
        function="KnobFactors.of",
        before="if touches is None:",
        after="if touches is None or touches:",
        what="A knob that touches one group of terms scales the whole step as well.",
    ),
    Fault(
        name="knob-of-another-trainer-is-ours",
        function="KnobValue.of",
        before="(cls(software, name, type(value), value)",
        after='(cls("", name, type(value), value)',
        what="What was measured of a knob of another trainer is believed of ours.",
    ),
    Fault(
        name="not-condition-for-deephyper",
        function="JobParameters._expressed",
        before="return self._expressed(node.part, not wanted)",
        after="return self._expressed(node.part, wanted)",
        what="DeepHyper gets a knob where its condition, which has a `not`, does not hold.",
    ),
    Fault(
        name="losses-of-every-knob-are-one-group",
        function="_measured",
        before='if knob.losses == "other"',
        after='if knob.losses == "none"',
        what="Jobs whose knob changes losses fail as diverged.",
        also="others",
    ),
    Fault(
        name="empty-knob-field-is-the-first-value",
        function="KnobReader.settings",
        before="elif text:",
        after="elif text or name in self.inferred:",
        what="A table whose row leaves a knob empty is refused.",
    ),
    Fault(
        name="switch-of-a-table-is-a-number",
        function="_kind_of",
        before='else {"true", "false", "1", "0"}',
        after='else {"true", "false"}',
        what="A column of ones and zeros that is declared a knob is read as numbers.",
    ),
    Fault(
        name="hidden-effects-forget-the-trainer",
        function="HiddenEffects.of_value",
        before="repr((self.seed, self.trainer, name, value))",
        after="repr((self.seed, name, value))",
        what="A knob of the same name does the same in every simulated trainer.",
    ),
    Fault(
        name="simulated-knob-spares-the-pipeline",
        function="_built",
        before='[effect.of("pp") * hop_s for hop_s in stages.hops(placement, sums)]',
        after="stages.hops(placement, sums)",
        what="A simulated knob that touches the pipeline's transfers does nothing.",
    ),
    Fault(
        name="knob-argument-stands-beside-the-default-one",
        function="with_arguments",
        before='left_out |= {word for words in added for word in words if word.startswith("--")}',
        after="left_out |= set()",
        what="An export writes an option of a knob twice, with both values.",
    ),
    Fault(
        name="contradicting-compile-is-accepted",
        function="TrainerOptions.from_knobs",
        before='if compiled and knobs.get("compile", True) is False:',
        after='if compiled and knobs.get("compile", True) is None:',
        what="A probe that compiles takes a job that does not.",
    ),
)
