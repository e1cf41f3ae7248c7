"""The settings of generated tests, also for runs without conftest.py: `-p tests.patience`."""

import hypothesis

from tests.size import sized

# A busy machine makes an example slow, but not wrong.
hypothesis.settings.register_profile(
    "wirecall",
    deadline=None,
    max_examples=sized(small=40, full=100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("wirecall")
