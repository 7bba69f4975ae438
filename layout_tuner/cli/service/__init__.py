"""Commands that send requests to a service: campaigns, trials, leaderboards, exports, tokens."""
