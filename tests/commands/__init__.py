"""Commands take effect once: the same tests over memory, SQLite, Redis and PostgreSQL."""

import pytest

# pytest explains its failed assertions as it does those of a test.
pytest.register_assert_rewrite("tests.commands.charges")
