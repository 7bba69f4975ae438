"""Parallelism: mesh, tensor, sequence and pipeline parallelism, gradient reduction, ZeRO."""
