"""The search driver, its strategies and replays; the only home of DeepHyper and Optuna."""
