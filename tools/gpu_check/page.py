"""The report of `make gpu-check` as one HTML page, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

_TEMPLATE: Final = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>layout-tuner on {{ r.machine.device if r.machine else r.device }}</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #8884 }
td.n { text-align: right; font-variant-numeric: tabular-nums }
td.n, td.layout { white-space: nowrap }
</style>
<h1>layout-tuner on {{ r.machine.device if r.machine else r.device }}</h1>
<p>{{ r.started_at }}: {{ "passed" if r.passed else "not passed" }} in {{ r.seconds }} s.</p>
<table><caption>Steps</caption>
<tr><th>step<th>status<th>seconds<th>limit<th>message
{% for s in r.steps -%}
<tr><td>{{ s.name }}<td>{{ s.status }}<td class="n">{{ s.seconds }}<td class="n">{{ s.limit_s|int }}
<td>{{ s.message }}
{% endfor %}</table>
{% if r.machine %}<table><caption>Machine</caption>
{% for name, value in r.machine.items() if name != "versions" -%}
<tr><th>{{ name }}<td>{{ value|mib if name == "device_memory_bytes" else value }}
{% endfor %}{% for name, value in r.machine.versions.items() -%}
<tr><th>{{ name }}<td>{{ value }}
{% endfor %}</table>{% endif %}
{% if r.calibration %}<table><caption>Measured constants</caption>
{% for name, value in r.calibration.constants.items() -%}
<tr><th>{{ name }}<td>{{ value }}
{% endfor %}{% for warning in r.calibration.warnings -%}
<tr><th>warning<td>{{ warning }}
{% endfor %}</table>{% endif %}
{% if r.comparison %}<table><caption>Predicted before the measurement, then measured</caption>
<tr><th>campaign<th>layouts compared<th>Kendall's tau<th>Spearman's rho
<th>median error of the step time<th>of the peak memory
{% for name, c in r.comparison.campaigns.items() -%}
<tr><td>{{ name }}<td class="n">{{ c.num_compared }}<td class="n">{{ c.kendall_tau|number }}
<td class="n">{{ c.spearman_rho|number }}<td class="n">{{ c.step_time_median_error|percent }}
<td class="n">{{ c.peak_memory_median_error|percent }}
{% endfor %}</table>
<p>{{ r.comparison.num_completed }} of {{ r.comparison.num_layouts }} layouts completed,
{{ r.comparison.num_out_of_memory }} ran out of memory; of these
{{ r.comparison.out_of_memory_expected }} were expected to.</p>
<table><caption>Layouts</caption>
<tr><th>campaign<th>layout<th>state<th>step, predicted<th>measured<th>ratio<th>peak, predicted
<th>measured<th>fits<th>tokens/s<th>MFU<th>message
{% for l in r.layouts -%}
<tr><td>{{ l.campaign }}<td class="layout">{{ l.precision }}, micro-batch {{ l.micro_batch_size }}, recompute
{{ l.recompute }}<td>{{ l.reason or l.state }}<td class="n">{{ l.predicted_step_time_s|ms }}
<td class="n">{{ l.step_time_s|ms }}
<td class="n">{{ (l.predicted_step_time_s / l.step_time_s if l.step_time_s
  and l.predicted_step_time_s else none)|number }}
<td class="n">{{ l.predicted_peak_bytes|mib }}<td class="n">{{ l.peak_bytes|mib }}
<td class="n">{{ l.predicted_fits|percent }}<td class="n">{{ l.tokens_per_s|whole }}
<td class="n">{{ l.mfu|percent }}<td>{{ l.message }}
{% endfor %}</table>{% endif %}
{% if r.training %}<p>The exported job of {{ r.export.campaign }} ({{ r.export.layout_key }}) ran at
{{ r.training.tokens_per_s|whole }} tokens/s over {{ r.training.steps }} steps,
{{ r.training.over_probe|number }} times what its probe measured.</p>{% endif %}
{% if r.tests %}<p>Tests: {{ r.tests.passed }} passed, {{ r.tests.failed }} failed,
{{ r.tests.skipped }} skipped.</p>
<ul>{% for f in r.tests.failures %}<li>{{ f.test }}: {{ f.message }}{% endfor %}</ul>{% endif %}
{% if r.bench %}<table><caption>The trainer beside plain loops</caption>
<tr>{% for name in r.bench[0] %}<th>{{ name }}{% endfor %}
{% for row in r.bench %}<tr>{% for value in row.values() %}<td>{{ value }}{% endfor %}
{% endfor %}</table>{% endif %}
</html>
"""

_NONE: Final = "–"


def page_of(report: Mapping[str, Any]) -> str:
    """The page; every text of the report is escaped, and parts that are missing are left out."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(
        {
            "number": lambda value: _NONE if value is None else f"{value:.3g}",
            "percent": lambda value: _NONE if value is None else f"{value:.1%}",
            "ms": lambda value: _NONE if value is None else f"{1e3 * value:.4g} ms",
            "mib": lambda value: _NONE if value is None else f"{value / 2**20:,.1f} MiB",
            "whole": lambda value: _NONE if value is None else f"{value:,.0f}",
        }
    )
    parts = ("machine", "calibration", "comparison", "training", "tests", "bench", "layouts")
    return environment.from_string(_TEMPLATE).render(r={**dict.fromkeys(parts), **report})
