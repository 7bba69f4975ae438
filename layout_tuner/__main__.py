"""`python -m layout_tuner` is the command `layout-tuner`."""

import sys

from layout_tuner.cli.main import main

if __name__ == "__main__":
    sys.exit(main(prog_name="layout-tuner"))
