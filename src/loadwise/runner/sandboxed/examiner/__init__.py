"""Run unit tests against code that nobody trusts, so that the code cannot forge its marks.

*Theory of operation.* Two processes in one sandbox. The examiner (this process) holds the tests, and alone writes the
report. The candidate's code runs in a child. It never sees a test, only the arguments of one call at a time, and
answers with plain data over a pipe. Every assertion is evaluated here, on values rebuilt from that data as exact
builtins: an object that is equal to everything, an overwritten `abs`, `os._exit(0)`, an `atexit` hook or a forged
report line reach nothing that decides. The examiner makes itself undumpable, so that a child of the same user cannot
read or write its memory or its descriptors; where it cannot, the report says so. The candidate may still kill or stop
us: then there is no report after the line `started`, which counts as its failure, not as ours.

Left over: objects of the candidate's own classes stay with it, and their answers (attributes, iteration) are its word,
as they would be in one process. Two of them are never equal here.

Input: one JSON object on stdin (see `verify/unit_tests.py`). Output: JSON lines, each with the nonce.
Standard library only: it runs under whatever Python the sandbox has.
"""
