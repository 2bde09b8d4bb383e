"""`python -m pdserve.cli`: the same as `pdserve`."""

import sys

from pdserve.cli.main import console

if __name__ == "__main__":
    sys.exit(console())
