"""Each test that uses a gateway runs in both ways of calling it."""

from __future__ import annotations

import inspect

import pytest

from tests.unit.gateway import gateway_lab
from tests.unit.gateway.gateway_lab import Way


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    uses_a_lab = getattr(metafunc.module, "gateway_lab", None) is gateway_lab.gateway_lab
    if uses_a_lab and inspect.iscoroutinefunction(metafunc.function):
        only = metafunc.definition.get_closest_marker("only_way")
        metafunc.parametrize("called_by", only.args if only else list(Way), indirect=True)


@pytest.fixture(autouse=True)
def called_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_lab, "way", getattr(request, "param", Way.ASGI))
