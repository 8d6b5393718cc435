"""`python -m vlmrl`: the command line."""

import sys

from vlmrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
