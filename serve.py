"""`python serve.py [flags]`: the server from a checkout. The same as the installed `nanoserve serve`."""

from __future__ import annotations

import sys

from nanoserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
