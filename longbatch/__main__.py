"""`python -m longbatch`."""

import sys

from longbatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
