"""Plots as SVG: layouts, schedules and bars, and plot data drawn without a script.

They need no script, so that the report has them too, and their colours are classes of the style
sheet. On the pages, the script draws plot data with plotly instead, so that users can zoom.
"""
