from __future__ import annotations

import pytest

from tests.manager.managed import MoodyRoot


@pytest.fixture
def moody(tmp_path) -> MoodyRoot:
    return MoodyRoot(tmp_path)
