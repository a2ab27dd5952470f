"""The problem generators, one module per family: `PROBLEMS[level - 1](luck)` makes one problem of that level."""
