"""The pages are whole in themselves: a browser is allowed nothing but their own script and style, and this server."""

import re
from base64 import b64encode
from hashlib import sha256

import httpx
import pytest

from crossdock.router.pages.routes import content_security_policy

PAGES = ["/", "/docs"]


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_asks_no_other_server_for_anything(client: httpx.AsyncClient, path: str) -> None:
    page = (await client.get(path)).text
    assert re.findall(r"(?:src|href|url|@import)\s*[=(]\s*[\"']?(?:https?:)?//", page) == []
    assert re.findall(r"\s(?:style|on\w+)=\"", page) == []


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_may_run_its_own_script_alone(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    script = re.findall(r"<script>(.*?)</script>", response.text, re.DOTALL)
    assert len(script) == 1
    assert rules["script-src"] == f"'sha256-{b64encode(sha256(script[0].encode()).digest()).decode()}'"
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")


def test_a_page_without_script_may_run_none() -> None:
    rules = content_security_policy("<style>p {}</style>").split("; ")
    assert "script-src 'none'" in rules
