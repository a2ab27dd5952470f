"""One run of the tests is like every other: property tests draw the same examples, unless told to search on.

None of them fails for what a clock says: a busy machine is slow, and a slow example is no wrong one.
"""

import os

from hypothesis import HealthCheck, settings

for name, is_same in (("same", True), ("search", False)):
    settings.register_profile(name, derandomize=is_same, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Doing `LOADWISE_HYPOTHESIS=search make test` now and then finds what the usual examples do not.
settings.load_profile(os.environ.get("LOADWISE_HYPOTHESIS", "same"))
