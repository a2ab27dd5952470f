"""One run of the tests is like every other: property tests draw the same examples, unless told to search on."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False)
# Doing `LOADWISE_HYPOTHESIS=search make test` now and then finds what the usual examples do not.
settings.load_profile(os.environ.get("LOADWISE_HYPOTHESIS", "same"))
