"""`python -m fewkeys` is the command `fewkeys`."""

import sys

from fewkeys.cli import main

sys.exit(main())
