"""The laws of the router are tested with the host of its own tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
