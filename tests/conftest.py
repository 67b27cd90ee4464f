"""Registers what all tests share, once, whichever folder of tests comes first."""

import pytest

from support import suite


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.is_registered(suite):
        pluginmanager.register(suite)
