"""``python -m decent_dp`` is ``decent-dp``."""

import sys

from decent_dp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
