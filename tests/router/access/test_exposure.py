"""What whoever starts a server hears about who can reach it."""

from pathlib import Path

import pytest

from crossdock.core.config import DoorConfig, RouterConfig
from crossdock.router.access.exposure import exposure

KEYS, CERTIFICATE = Path("keys.jsonl"), Path("cert.pem")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_nothing_is_said(host: str) -> None:
    assert exposure(RouterConfig("toy", host=host)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu7", ""])
def test_beyond_it_open_doors_and_open_letters_are_named(host: str) -> None:
    def heard(door: DoorConfig) -> list[str]:
        return [warning.split()[0] for warning in exposure(RouterConfig("toy", host=host, door=door))]

    assert heard(DoorConfig()) == ["ANYONE", "prompts,"]
    assert heard(DoorConfig(api_key="letmein")) == heard(DoorConfig(api_keys=KEYS)) == ["prompts,"]
    assert heard(DoorConfig(tls_cert=CERTIFICATE)) == ["ANYONE"]
    assert heard(DoorConfig(tls_cert=CERTIFICATE, api_keys=KEYS)) == []


def test_no_text_of_a_configuration_holds_its_key() -> None:
    config = RouterConfig("toy", host="0.0.0.0", door=DoorConfig(api_key="letmein"))
    assert "letmein" not in f"{config!r} {exposure(config)}"
