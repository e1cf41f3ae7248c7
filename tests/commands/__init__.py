"""Commands take effect once: the same tests over memory, SQLite, Redis and PostgreSQL."""

import pytest

# Its assertions are to say as much as those of a test.
pytest.register_assert_rewrite("tests.commands.charges")
