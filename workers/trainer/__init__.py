"""The embedded trainer: tensor, context, expert, pipeline and data parallelism, and ZeRO.

Of other projects it imports torch and numpy alone.
"""
