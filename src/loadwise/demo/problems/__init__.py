"""Problem generators, one module per family: `PROBLEMS[level - 1](luck)` makes a problem of that level."""
