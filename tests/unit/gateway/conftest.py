"""Each test that uses a gateway runs in both ways of calling it."""

from __future__ import annotations

import pytest

from tests.unit.gateway import gateway_lab
from tests.unit.gateway.gateway_lab import Way


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if getattr(metafunc.module, "gateway_lab", None) is gateway_lab.gateway_lab:
        only = metafunc.definition.get_closest_marker("only_way")
        metafunc.fixturenames.append("called_by")
        metafunc.parametrize("called_by", only.args if only else list(Way), indirect=True)


@pytest.fixture
def called_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_lab, "way", request.param)
