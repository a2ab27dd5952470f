"""`python -m loadwise`."""

import sys

from loadwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
