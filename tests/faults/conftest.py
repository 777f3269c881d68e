"""The tiny model that every faulty engine serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.demo import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=2)
