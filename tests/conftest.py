"""Every test gets the marker of its folder; Hypothesis never judges by the clock."""

from pathlib import Path

import hypothesis
import pytest

_TIERS = ("unit", "pipelines", "storage", "infra")

hypothesis.settings.register_profile("scone", deadline=None)
hypothesis.settings.load_profile("scone")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(root).parts[0]
        if tier in _TIERS:
            item.add_marker(getattr(pytest.mark, tier))
