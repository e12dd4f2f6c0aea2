"""Which keys are read, from where, and what is accepted of a header."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest

from serving.config import GatewayConfig
from serving.core.errors import ConfigError
from serving.gateway.api_keys import ApiKeys, are_configured, read_keys

ALICE = "alice-0123456789abcdef"
BOB = "bob-0123456789abcdef"


def key_file(directory: Path, content: bytes, mode: int = 0o600) -> GatewayConfig:
    path = directory / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return GatewayConfig(api_keys_file=str(path))


def opened_by(keys: ApiKeys) -> set[str]:
    return {key for key in (ALICE, BOB) if keys.accept(f"Bearer {key}".encode())}


def test_keys_of_the_file_and_of_the_environment_count_together(tmp_path: Path) -> None:
    config = key_file(tmp_path, f"# who: alice\n\n  {ALICE}  \r\n".encode())
    assert opened_by(read_keys(config, {})) == {ALICE}
    assert opened_by(read_keys(GatewayConfig(), {"TANDEM_API_KEYS": f"{BOB}, {ALICE}"})) == {ALICE, BOB}
    assert opened_by(read_keys(config, {"TANDEM_API_KEYS": BOB})) == {ALICE, BOB}


def test_without_keys_none_is_needed() -> None:
    assert not read_keys(GatewayConfig(), {}).are_needed
    assert not read_keys(GatewayConfig(), {"TANDEM_API_KEYS": ""}).are_needed, (
        "as Compose passes an unset one"
    )
    assert not are_configured(GatewayConfig(), {"TANDEM_API_KEYS": ""})


def test_a_key_is_needed_where_one_is_configured(tmp_path: Path) -> None:
    assert are_configured(key_file(tmp_path, ALICE.encode()), {})
    assert are_configured(GatewayConfig(), {"TANDEM_API_KEYS": ALICE})
    assert ApiKeys([ALICE]).are_needed


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (ALICE.encode(), 0o604, "mode 0604 lets everybody on this machine read it; chmod o-rw"),
        (ALICE.encode(), 0o602, "mode 0602 lets everybody on this machine write it; chmod o-rw"),
        (b"", 0o600, "holds no key"),
        (b"# nothing\n", 0o600, "holds no key"),
        (b"\n\nshort-one\n", 0o600, "line 3: a key must be 16 to 256 printable ASCII .*; this one has 9"),
        (f"{ALICE} # alice".encode(), 0o600, "line 1: .* without spaces"),
        (b"x" * 257, 0o600, "line 1: .*; this one has 257"),
        ("schlüssel-0123456789".encode(), 0o600, "line 1: "),
        (b"\xff\xfe", 0o600, "not text in UTF-8"),
    ],
)
def test_a_file_that_would_not_do_is_refused_without_showing_keys(
    tmp_path: Path, content: bytes, mode: int, said: str
) -> None:
    config = key_file(tmp_path, content, mode)
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(config, {})
    assert f"gateway.api_keys_file = {config.api_keys_file}" in str(caught.value)
    assert ALICE not in str(caught.value)
    assert "short-one" not in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(ConfigError, match="keys: is not a file"):
        read_keys(GatewayConfig(api_keys_file=str(tmp_path / "keys")), {})


def test_a_group_may_read_the_file(tmp_path: Path) -> None:
    assert read_keys(key_file(tmp_path, ALICE.encode(), 0o640), {}).are_needed


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(GatewayConfig(api_keys_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize("given", [",", f"{ALICE},", "short"])
def test_a_faulty_environment_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_API_KEYS: key \d: ") as caught:
        read_keys(GatewayConfig(), {"TANDEM_API_KEYS": given})
    assert ALICE not in str(caught.value)


def test_the_number_of_keys_is_bounded() -> None:
    with pytest.raises(ConfigError, match="1001 API keys; at most 1000"):
        read_keys(GatewayConfig(), {"TANDEM_API_KEYS": ",".join(f"key-{n:016}" for n in range(1001))})


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        (f"Bearer {ALICE}", True),
        (f"bearer   {ALICE} ", True),
        (f"Bearer {ALICE}x", False),
        (f"Bearer {ALICE[:-1]}", False),
        (f"Bearer {ALICE.upper()}", False),
        (f"Bearer {ALICE} {BOB}", False),
        (f"Basic {ALICE}", False),
        (ALICE, False),
        ("Bearer", False),
        ("Bearer ", False),
        ("", False),
    ],
)
def test_what_is_accepted_of_a_header(header: str, is_accepted: bool) -> None:
    assert ApiKeys([BOB, ALICE]).accept(header.encode()) is is_accepted


def test_every_key_is_compared_wherever_the_right_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []

    def counting(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return hmac_compare(a, b)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert ApiKeys([ALICE, BOB, BOB]).accept(f"Bearer {ALICE}".encode())
    assert not ApiKeys([ALICE]).accept(b"Bearer x")
    assert lengths == [(32, 32)] * 4, "digests, whose length says nothing of a key's"


def test_no_key_can_be_read_off_the_object() -> None:
    keys = ApiKeys([ALICE])
    assert ALICE not in repr(keys) + repr(vars(keys))
