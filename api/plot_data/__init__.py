"""The data of plots: pure functions from records to plain data.

Only `campaign_plots` reads the store.
"""
