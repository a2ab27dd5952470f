"""What success means: which verifier judges a program, what it asks the world, and how it reads the findings.

*Theory of operation.* A verifier does no I/O. `begin(case)` gives a verdict at once, or says which check it wants
carried out (`Wanted`); the runner carries the check out and hands the `Finding` to `resume`. So every verifier is
tested without a sandbox, a model or a network, and every check runs under one set of limits, quotas and retries.

    case.py       what is judged           verifier.py   the protocol, and how verdicts are made
    check.py      checks out, findings in  registry.py   from a configuration to a verifier
    debias.py     known error rates out of the reward

What an answer holds is hostile until proven otherwise: it is read within bounds (`reading.py`) and never executed here.
"""
