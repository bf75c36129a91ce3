"""Clients that keep asking while something goes wrong with the server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import httpx

from .clients import Answer, complete, connected
from .questions import Question
from .server import Server

BACK_OFF_SECONDS = 0.1
END_SECONDS = 20.0
"""A client that waits longer, whatever happened, hangs."""


class Load:
    """Asks known questions again and again, streamed and not, and judges every answer.

    ``errors`` are honest ones, ``faults`` all other answers that were not right or took too long.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self.faults: list[str] = []
        self.num_right = 0
        self.errors: list[Answer] = []
        self._questions = questions
        self._is_over = False

    @asynccontextmanager
    async def from_clients(self, num_clients: int, url: str) -> AsyncIterator[None]:
        """Every client ends its last request after the block."""
        async with connected(url) as client, asyncio.TaskGroup() as clients:
            for number in range(num_clients):
                clients.create_task(self._ask_on(client, Random(number)))
            try:
                yield
            finally:
                self._is_over = True

    async def _ask_on(self, client: httpx.AsyncClient, random: Random) -> None:
        while not self._is_over:
            question = random.choice(self._questions)
            max_tokens = random.randint(2, question.longest)
            answer = await complete(client, question.body(max_tokens, stream=random.random() < 0.5))
            self._judge(answer, question.fault_of(answer, max_tokens))
            if answer.error is not None:
                await asyncio.sleep(BACK_OFF_SECONDS)

    def _judge(self, answer: Answer, fault: str | None) -> None:
        if fault is not None or answer.seconds > END_SECONDS:
            self.faults.append(fault or f"only after {answer.seconds:.0f} s came {answer}")
        elif answer.error is None:
            self.num_right += 1
        else:
            self.errors.append(answer)


async def strike_under_load(
    server: Server, questions: Sequence[Question], strike: Callable[[], None], num_clients: int = 12
) -> Load:
    """Strike while KV is on its way and requests decode; the load goes on until service is as good as before."""
    load = Load(questions)
    async with load.from_clients(num_clients, server.url):
        await asyncio.to_thread(server.wait_for, lambda: load.num_right >= num_clients and is_in_use(server), 20)
        await asyncio.to_thread(strike)
        num_right = load.num_right
        await asyncio.to_thread(server.wait_for, lambda: load.num_right >= num_right + 2 * num_clients, 20)
    return load


def is_in_use(server: Server) -> bool:
    scrape = server.scrape()
    arriving, running = (scrape.worker(f"requests_{table}", role="decode") for table in ("arriving", "running"))
    return arriving > 0 and running > 0
