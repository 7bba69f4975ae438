"""What holds for every test."""

from workers.ray_cluster import prepare_environment

# Ray reads its authentication from the environment while it is imported, once a process; DeepHyper
# imports Ray, and the tests of the tuner import DeepHyper.
prepare_environment()
