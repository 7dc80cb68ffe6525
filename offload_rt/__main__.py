"""`python -m offload_rt` is the command `offload-rt`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
