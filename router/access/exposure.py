"""What whoever starts a server must hear about who can reach it."""

import ipaddress

from ...core.config import RouterConfig


def exposure(config: RouterConfig) -> list[str]:
    """A warning a line, none on loopback."""
    if is_loopback(config.host):
        return []
    door, warnings = config.door, []
    if door.api_keys is None and door.api_key is None:
        warnings.append(
            f"ANYONE who reaches {config.host} port {config.port} can use this server: "
            "no API keys are asked for (--api-keys, --api-key)"
        )
    if door.tls_cert is None:
        warnings.append(
            f"prompts, answers and API keys cross the network of {config.host} unencrypted, unless something in front "
            "of this server does TLS (--tls-cert)"
        )
    return warnings


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
