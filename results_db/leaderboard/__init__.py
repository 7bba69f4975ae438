"""The leaderboard: ranking, pages, and the table that it is read from."""
