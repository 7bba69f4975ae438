"""The leaderboard: ranking, filters, intervals, baselines, and points of plots."""
