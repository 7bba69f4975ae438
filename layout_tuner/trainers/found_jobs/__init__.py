"""Readers of the files of jobs that people run: launch scripts and trainers' configurations."""
