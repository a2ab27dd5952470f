"""Draw the demo's result as the picture that the README shows.

python -m experiments.demo_picture > docs/demo.svg
"""

import io
import re
import sys

from rich.console import Console

from loadwise.demo.command import demo
from loadwise.demo.render import render_result
from loadwise.runner.embed import make_embedder

SEED = 0
IDS: tuple[str, ...] = ()
"""The demo's problems are made by seed: there are no measured tasks to list."""


def main() -> int:
    """Run the demo and print an SVG that needs nothing from elsewhere."""
    result, _ = demo(seed=SEED, embedder=make_embedder("hash", 16))
    console = Console(record=True, width=92, file=io.StringIO())
    console.print(render_result(result))
    svg = console.export_svg(title=f"loadwise demo --seed {SEED}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    print(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
