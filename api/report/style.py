"""The style sheet of a report, for screen and paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { --ink: #1c2330; --soft: #5b6675; --line: #d9dee5; --tint: #f4f6f9; --blue: #0b63b0;
  --sky: #7db8e8; --green: #12805c; --amber: #d98300; --red: #c63d17; --plum: #9b5192; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 28px 20px 60px; overflow-wrap: anywhere; }
header { border-bottom: 2px solid var(--ink); margin-bottom: 18px; }
h1 { font-size: 30px; line-height: 1.15; margin: 0 12px 0 0; display: inline-block; }
h2 { font-size: 20px; margin: 40px 0 10px; padding-bottom: 4px; border-bottom: 1px solid var(--line); }
h3 { font-size: 15px; margin: 22px 0 6px; }
p { margin: 6px 0 10px; }
.state { display: inline-block; padding: 2px 10px; border-radius: 11px; font-size: 12px;
  font-weight: 600; background: var(--tint); color: var(--soft); vertical-align: 6px; }
.state.completed { background: #dcf1e8; color: var(--green); }
.state.failed, .state.cancelled { background: #fbe4dc; color: var(--red); }
.state.running { background: #dfecf8; color: var(--blue); }
.subject { color: var(--soft); margin: 4px 0 12px; }
.lead { font-size: 17px; }
.note { color: var(--soft); font-size: 13px; }
.notes { white-space: pre-wrap; border-left: 3px solid var(--blue); padding: 4px 12px;
  background: var(--tint); }
.warning { border-left: 3px solid var(--amber); padding: 4px 12px; background: #fdf4e3;
  font-size: 13px; }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0; }
.card { flex: 1 1 130px; border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.card b { display: block; font-size: 22px; line-height: 1.2; }
.card span { color: var(--soft); font-size: 12px; }
.beside { display: flex; flex-wrap: wrap; gap: 0 36px; align-items: flex-start; }
.beside > * { flex: 1 1 320px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; overflow-wrap: normal; }
th, td { text-align: left; padding: 4px 7px; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom;
  border-bottom: 1px solid var(--soft); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
tbody tr:first-child td { border-top: 0; }
.pairs th { font-weight: 400; color: var(--soft); width: 45%; }
.pairs td { overflow-wrap: anywhere; }
td svg { vertical-align: middle; }
td code, td { max-width: 340px; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace;
  font-size: 12px; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 12px; }
.example { margin-left: 2px; }
svg { max-width: 100%; height: auto; display: block; font: 11px system-ui, "DejaVu Sans", sans-serif; }
.stacked svg, section > svg { width: 100%; }
td svg { display: inline-block; max-width: none; }
svg text { fill: var(--soft); }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .label { fill: var(--ink); font-size: 12px; }
svg .named { fill: var(--ink); }
svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--soft); }
svg .whisker { stroke: var(--soft); stroke-width: 1.5; }
svg .best { fill: none; stroke: var(--green); stroke-width: 1.6; }
polyline.front { fill: none; stroke: var(--blue); stroke-width: 1.2; stroke-dasharray: 4 3; }
.full { fill: #8795a8; stroke: #8795a8; }
.again { fill: var(--plum); stroke: var(--plum); }
.short { fill: #fff; stroke: #8795a8; }
.unranked { fill: #fff; stroke: var(--line); }
circle.front, path.front { fill: var(--blue); stroke: var(--blue); }
.winner { fill: var(--green); stroke: var(--green); }
.memory { fill: var(--amber); stroke: var(--amber); }
circle.failed, path.failed { fill: var(--red); stroke: var(--red); }
circle.cancelled, path.cancelled { fill: var(--line); stroke: var(--soft); }
.many { fill: none; stroke-width: 5; stroke-linecap: round; }
.better { fill: var(--green); }
.worse { fill: var(--red); }
.part1 { fill: var(--blue); background: var(--blue); }
.part2 { fill: var(--sky); background: var(--sky); }
.part3 { fill: var(--amber); background: var(--amber); }
.part4 { fill: var(--red); background: var(--red); }
.part5 { fill: var(--green); background: var(--green); }
.part6 { fill: #b8c0cb; background: #b8c0cb; }
.keys { font-size: 13px; }
.keys span { display: inline-block; margin-right: 18px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
footer { margin-top: 44px; padding-top: 8px; border-top: 1px solid var(--line); color: var(--soft);
  font-size: 12px; }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; }
  svg, .card, .example, tr { break-inside: avoid; } body { font-size: 11pt; } .wide { overflow: visible; }
  table { font-size: 8pt; } th, td { padding: 2px 4px; } }
"""
