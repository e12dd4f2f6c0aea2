"""What the machine can do at most, kept in a file."""

from pathlib import Path

import pytest

from serving import ceilings
from serving.core.errors import ConfigError


def test_what_was_measured_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    assert ceilings.kept() is None
    measured = ceilings.Ceilings(39e9, 10e9, "float32", 1e9)
    ceilings.keep(measured)
    assert ceilings.kept() == measured


def test_a_file_of_another_shape_is_refused_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    (tmp_path / "ceilings.json").write_text('{"flops_per_s": 1}')
    with pytest.raises(ConfigError, match=r"ceilings\.json.*copy_bytes_per_s"):
        ceilings.kept()
