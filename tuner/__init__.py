"""The search driver and its strategies; the only home of DeepHyper."""
