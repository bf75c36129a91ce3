"""Clients that ask known questions while everything goes wrong; each answer is right, an honest error, or a fault."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx

from ..clients import Answer, complete, complete_for, connected
from ..questions import Question
from .fleet import REQUEST_SECONDS

DEADLINE_SECONDS = REQUEST_SECONDS + 5.0
"""A client that waits longer hangs."""
BACK_OFF_SECONDS = 0.1
MAX_DELAY_SECONDS = 4.0


class Visitors:
    """``num_regulars`` clients ask one question after the other, until `leave`; a `burst` comes on top.

    One in six leaves at a time of its own, or after some events of a stream. ``errors`` counts what honest errors said.
    """

    def __init__(self, questions: Sequence[Question], url: str, num_regulars: int, seed: int) -> None:
        self.num_right = 0
        self.num_left = 0
        self.errors: Counter[str] = Counter()
        self.faults: list[str] = []
        self._questions = questions
        self._url = url
        self._num_regulars = num_regulars
        self._seed = seed
        self._is_over = False
        self._num_waiting_burst = 0
        self._thread = ThreadPoolExecutor(1)
        self._visits = self._thread.submit(asyncio.run, self._receive())

    def burst(self, num_clients: int) -> None:
        """So many more come at once, and ask once each."""
        self._num_waiting_burst += num_clients

    def leave(self) -> None:
        """Everybody ends what was begun; raises what went wrong with the clients themselves."""
        self._is_over = True
        self._thread.shutdown()
        self._visits.result()

    @property
    def num_answered(self) -> int:
        return self.num_right + self.num_left + self.errors.total() + len(self.faults)

    async def _receive(self) -> None:
        async with connected(self._url) as client, asyncio.TaskGroup() as clients:
            for number in range(self._num_regulars):
                clients.create_task(self._ask_on(client, Random(f"{self._seed}/{number}")))
            random = Random(self._seed)
            while not self._is_over:
                num_clients, self._num_waiting_burst = self._num_waiting_burst, 0
                for _ in range(num_clients):
                    clients.create_task(self._ask(client, Random(random.random())))
                await asyncio.sleep(0.05)

    async def _ask_on(self, client: httpx.AsyncClient, random: Random) -> None:
        while not self._is_over:
            if not await self._ask(client, random):
                await asyncio.sleep(BACK_OFF_SECONDS)

    async def _ask(self, client: httpx.AsyncClient, random: Random) -> bool:
        """One question; whether it was answered."""
        question = random.choice(self._questions)
        max_tokens, is_stream = random.randint(1, question.longest), random.random() < 0.5
        body = question.body(max_tokens, stream=is_stream)
        try:
            match random.randrange(12):
                case 0:
                    await complete_for(client, body, random.uniform(0, MAX_DELAY_SECONDS))
                    self.num_left += 1
                case 1 if is_stream:
                    await complete(client, body, max_events=random.randint(1, 20))
                    self.num_left += 1
                case _:
                    answer = await complete_for(client, body, DEADLINE_SECONDS)
                    return self._judge(answer, question, max_tokens)
        except httpx.TransportError as error:
            self.errors[f"broken connection: {type(error).__name__}"] += 1
            return False
        return True

    def _judge(self, answer: Answer | None, question: Question, max_tokens: int) -> bool:
        if answer is None:
            self.faults.append(f"no end within {DEADLINE_SECONDS:.0f} s for {len(question.prompt)} prompt tokens")
            return False
        is_late = answer.status == 504
        fault = None if is_late else question.fault_of(answer, max_tokens)
        if fault is not None:
            self.faults.append(fault)
        elif answer.error is None:
            self.num_right += 1
        else:
            self.errors[answer.error] += 1
        return answer.error is None
