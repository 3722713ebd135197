"""`python -m nanoserve`: the `nanoserve` command."""

import sys

from nanoserve.cli import main

sys.exit(main())
