from __future__ import annotations

import pytest

from serving.core.addresses import server_root


@pytest.mark.parametrize("written", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("root", ["http://127.0.0.1:8000", "https://example.org/lab"])
def test_an_address_may_be_written_as_openais_clients_have_it(root: str, written: str) -> None:
    assert server_root(root + written) == root
