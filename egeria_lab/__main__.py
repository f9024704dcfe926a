"""``python -m egeria_lab`` is the command line."""

import sys

from egeria_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
