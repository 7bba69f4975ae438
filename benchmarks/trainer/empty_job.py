"""A job that does nothing but meet: what its launcher costs is all there is to time.

Run under torchrun, as one rank of it.
"""

from __future__ import annotations

import os
import sys

from torch import distributed as dist


def main() -> None:
    """Meets the other ranks, and leaves."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
