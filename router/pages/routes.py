"""Serves the pages, each with a content security policy that allows its own script and style and nothing else."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import Response

from ..openapi import get, plain

if TYPE_CHECKING:
    from ..app import Router


def page_routes(router: "Router") -> APIRouter:
    routes = APIRouter()
    status, docs = _page("status.html"), _page("docs.html")

    @get(routes, "/", plain("text/html", "A page for people"))
    async def status_page() -> Response:
        """Workers, charts, and a box to try a prompt."""
        return status

    @get(routes, "/docs", plain("text/html", "A page for people"))
    async def api_page() -> Response:
        """This description, to read."""
        return docs

    return routes


def _page(name: str) -> Response:
    """A page of this folder; made once, sent often."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_security_policy(text),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def content_security_policy(page: str) -> str:
    """Allows what stands in the page's own ``<script>`` and ``<style>`` and requests to this server.

    https://www.w3.org/TR/CSP3/
    """
    rules = {
        "default-src": "'none'",
        "script-src": _hashes(page, "script"),
        "style-src": _hashes(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{rule} {sources}" for rule, sources in rules.items())


def _hashes(page: str, element: str) -> str:
    bodies = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    digests = (b64encode(sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
