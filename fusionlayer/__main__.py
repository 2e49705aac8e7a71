"""``python -m fusionlayer``: the command ``fusionlayer``."""

import sys

from .cli import main

sys.exit(main())
