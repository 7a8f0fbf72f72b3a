"""`python -m oktopk` is `oktopk`."""

import sys

from .cli import main

# Workers import this module too, under another name.
if __name__ == "__main__":
    sys.exit(main())
