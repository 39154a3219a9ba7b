"""python -m magneto"""

from __future__ import annotations

import sys

from magneto.cli.main import main

sys.exit(main())
