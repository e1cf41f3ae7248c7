"""Fixtures of the tests of the server."""

import logging
from collections.abc import Iterator

import pytest

from tests.server.logs import Collector


@pytest.fixture
def log() -> Iterator[Collector]:
    logger = logging.getLogger("wirecall")
    collector = Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    yield collector
    logger.removeHandler(collector)
    logger.setLevel(level)
