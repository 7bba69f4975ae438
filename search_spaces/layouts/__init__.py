"""The layout: its knobs, its ranks, its pipeline schedules."""
