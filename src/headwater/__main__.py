"""``python -m headwater`` is the command ``headwater``."""

from __future__ import annotations

import sys

from headwater.cli import main

sys.exit(main())
