"""The real `openai` client, spoken to by a router without a socket."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import httpx2
import pytest
from openai import AsyncOpenAI

from crossdock.router.app import create_app

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster


@pytest.fixture
async def openai(cluster: "Cluster") -> AsyncIterator[AsyncOpenAI]:
    transport = httpx2.ASGITransport(create_app(cluster.router))
    http = httpx2.AsyncClient(transport=transport)
    async with AsyncOpenAI(base_url="http://router/v1", api_key="none", http_client=http, max_retries=0) as made:
        yield made
