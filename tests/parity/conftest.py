"""The live gateway of the parity tests is that of the gateway's own tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
