"""Parallelism: pipeline schedules, gradient reduction, ZeRO, flat buffers and loss scaling."""
