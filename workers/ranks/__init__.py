"""The processes on a node: warden, zygote, keeper and ranks, and the memory that they use."""
