"""Drawings as SVG, made on the server from layouts and records.

They need no script, so that the report has them too, and their colours are classes of the style
sheet. The plots that users zoom into are plotly's and are not here.
"""
