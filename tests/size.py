"""How much the long tests do: kills, races and models are small in `make test`, and whole in `make
test SIZE=full`.

The small ones meet the same code with the same checks; they take fewer examples, or a random part
of the cases.
"""

import os
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("TEST_SIZE", "small") == "full"


def sized(*, small: T, full: T) -> T:
    return full if IS_FULL else small
