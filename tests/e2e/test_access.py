"""The door of real servers: keys, limits, tenants, usage, TLS, web pages, deadlines."""

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, DefaultHttpxClient, OpenAI, RateLimitError

from crossdock.deploy.launch import crossdock_command
from crossdock.router.access.key_file import add_key, revoke_key
from crossdock.router.access.keys import KeyRecord, new_key

from .answers import Json
from .server import Server, serving

CERTIFICATES = Path(__file__).parent.parent / "router" / "access" / "certificates"
AUTHORITY = CERTIFICATES / "authority.pem"
PAGE = "https://page.example"
RELOAD_SECONDS = 5.0


def num_tokens_of(stream: httpx.Response) -> int:
    """Of a stream with logprobs, where every token is shown."""
    return stream.text.count('"token_logprobs":[')


class Keys:
    """A keys file in an operator's hands (tests/test_cli_access.py has the commands)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, **limits: Any) -> httpx.Headers:
        """What a client with the new key sends."""
        key = new_key()
        add_key(self.path, KeyRecord(name=name, id="", salt="", digest="", **limits).sealed(key))
        return httpx.Headers({"authorization": f"Bearer {key}"})

    def revoke(self, name: str) -> None:
        revoke_key(self.path, name)


class Guarded:
    """A server with everything that the door has, and who may come in."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = str(model)
        self.keys = Keys(folder / "keys.jsonl")
        self.usage_db = folder / "usage.db"
        self.alice = self.keys.add("alice", requests_per_minute=6, tokens_per_minute=1000)
        self.bob = self.keys.add("bob", most_urgent=-1)
        self.carol = self.keys.add("carol", tenant="bob")
        self.flags = (
            *("--api-keys", str(self.keys.path), "--usage-db", str(self.usage_db)),
            *("--tls-cert", str(CERTIFICATES / "server.pem"), "--cors-origin", PAGE, "--max-body-size", "100K"),
        )
        self.server: Server

    def post(self, who: httpx.Headers, **body: object) -> httpx.Response:
        body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
        return self.server.client.post("/v1/completions", json=body, headers=who)

    def cached(self, who: httpx.Headers, **body: object) -> int:
        """Prompt tokens that this caller need not wait for."""
        usage = self.post(who, **body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def usage(self) -> dict[str, Json]:
        line = crossdock_command("usage", "--usage-db", str(self.usage_db), "--json")
        ended = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True)
        return {row["key"]: row for row in map(json.loads, ended.stdout.splitlines())}


@pytest.fixture(scope="module", params=["apart", "mixed"])
def guarded(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    guarded = Guarded(small_model, folder)
    roles = ("--mixed", "1") if request.param == "mixed" else ()
    with serving(small_model, folder / "log", *roles, *guarded.flags, authority=AUTHORITY) as guarded.server:
        yield guarded
    assert "Traceback" not in guarded.server.log
    assert all(key_of(who) not in guarded.server.log for who in (guarded.alice, guarded.bob))


def key_of(who: httpx.Headers) -> str:
    return who["authorization"].removeprefix("Bearer ")


def test_each_key_has_limits_of_its_own_and_openai_s_client_understands_them(guarded: Guarded) -> None:
    def ask(who: httpx.Headers, max_tokens: int) -> int:
        key = key_of(who)
        http = DefaultHttpxClient(verify=ssl.create_default_context(cafile=AUTHORITY))
        with OpenAI(base_url=f"{guarded.server.url}/v1", api_key=key, max_retries=0, http_client=http) as client:
            answer = client.completions.create(
                model=guarded.model, prompt="hi", max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert [ask(guarded.alice, 3), ask(guarded.bob, 3)] == [3, 3]
    with pytest.raises(AuthenticationError, match="Incorrect API key"):
        ask(httpx.Headers({"authorization": "Bearer sk-wrong"}), 3)
    assert [ask(guarded.alice, 1) for _ in range(5)] == [1] * 5
    with pytest.raises(RateLimitError) as refused:
        ask(guarded.alice, 1)
    assert (refused.value.type, refused.value.code) == ("requests", "rate_limit_exceeded")
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 10
    assert ask(guarded.bob, 3) == 3


def test_tenants_never_share_what_is_cached_and_keys_of_one_tenant_do(guarded: Guarded) -> None:
    dave = guarded.keys.add("dave")
    guarded.server.wait_for(lambda: guarded.post(dave, prompt=[1]).status_code == 200, RELOAD_SECONDS)
    prompt = [n % 300 for n in range(7, 107)]
    assert [guarded.cached(who, prompt=prompt) for who in (guarded.bob, guarded.bob)] == [0, 96]
    assert [guarded.cached(who, prompt=prompt) for who in (dave, guarded.carol, dave)] == [0, 96, 96]
    assert [guarded.cached(guarded.bob, prompt=prompt, cache_salt="x") for _ in range(2)] == [0, 96]
    assert [guarded.cached(dave, prompt=prompt, cache_salt=salt) for salt in ("x", "bob", "x")] == [0, 0, 96]


def test_priorities_go_as_far_as_the_key_does(guarded: Guarded) -> None:
    statuses = [guarded.post(guarded.bob, prompt=[1], priority=n).status_code for n in (-1, 0, 7, -2)]
    assert statuses == [200, 200, 200, 400]


def test_keys_change_under_load_and_no_token_is_lost(guarded: Guarded) -> None:
    erin, frank = guarded.keys.add("erin"), guarded.keys.add("frank")
    guarded.server.wait_for(lambda: guarded.post(frank, prompt=[1]).status_code == 200, RELOAD_SECONDS)
    answers: list[httpx.Response] = []
    body = {"prompt": [2], "max_tokens": 400, "stream": True, "logprobs": 0}
    streams = [threading.Thread(target=lambda: answers.append(guarded.post(erin, **body))) for _ in range(2)]
    for stream in streams:
        stream.start()
    guarded.keys.revoke("erin")
    guarded.keys.revoke("frank")
    guarded.server.wait_for(lambda: guarded.post(frank, prompt=[1]).status_code == 401, RELOAD_SECONDS)
    assert guarded.post(erin, prompt=[1]).status_code == 401
    for stream in streams:
        stream.join()
    assert [num_tokens_of(answer) for answer in answers] == [400] * 2
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)


def test_a_page_of_another_origin_may_ask_if_it_was_named(guarded: Guarded) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, status in ((PAGE, 200), ("https://other.example", 400)):
        response = guarded.server.client.options("/v1/completions", headers={"origin": origin, **asks})
        assert response.status_code == status
        assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


@pytest.mark.parametrize("stream", [False, True])
def test_out_of_time_means_out_of_the_workers_too(guarded: Guarded, stream: bool) -> None:
    who = httpx.Headers({**guarded.bob, "x-request-timeout": "0.4", "x-request-id": "slow"})
    response = guarded.post(who, prompt=[5], max_tokens=2000, stream=stream)
    error = json.loads(response.text.split("data: ")[-1])["error"]
    assert (response.status_code, response.headers["x-request-id"]) == (200 if stream else 504, "slow")
    assert (error["code"], error["message"]) == ("timeout", "the request took longer than 0.4 s")
    guarded.server.wait_until_nothing_is_left(10)


def test_what_is_too_long_or_too_deep_is_refused(guarded: Guarded) -> None:
    assert guarded.post(guarded.bob, prompt="x" * 110_000).status_code == 413
    deep: object = "x"
    for _ in range(200):
        deep = [deep]
    refused = guarded.post(guarded.bob, prompt=deep)
    assert (refused.status_code, "nests deeper than 100" in refused.text) == (400, True)


def test_usage_is_exact_and_outlives_a_kill(small_model: Path, tmp_path: Path) -> None:
    guarded = Guarded(small_model, tmp_path)
    with serving(small_model, tmp_path / "log", "--mixed", "1", *guarded.flags, authority=AUTHORITY) as guarded.server:
        for who, num_tokens in ((guarded.alice, 5), (guarded.bob, 7), (guarded.bob, 9)):
            assert guarded.post(who, prompt=[1, 2, 3], max_tokens=num_tokens, n=2).status_code == 200
        impatient = httpx.Headers({**guarded.carol, "x-request-timeout": "0.5"})
        cut = guarded.post(impatient, prompt=[1, 2, 3], max_tokens=2000, stream=True, logprobs=0)
        num_shown = num_tokens_of(cut)
        time.sleep(1)
        guarded.server.process.kill()
        guarded.server.process.wait(10)
        counts = ("requests", "prompt_tokens", "output_tokens")
        rows = {name: [row[count] for count in counts] for name, row in guarded.usage().items()}
    assert rows == {"alice": [1, 3, 10], "bob": [2, 6, 32], "carol": [1, 3, num_shown]}
    assert num_shown > 0


def test_beyond_loopback_without_keys_it_is_said_loudly(small_model: Path, tmp_path: Path) -> None:
    server = Server(str(small_model), ("--host", "0.0.0.0", "--control-port", "0"), tmp_path / "log", "router")
    try:
        server.wait_for(lambda: "WARNING ANYONE who reaches 0.0.0.0" in server.log, 20)
        server.wait_for(lambda: server.health == 503, 5)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--api-keys", "nowhere"), "crossdock: cannot read the keys file nowhere: No such file or directory"),
        (("--tls-cert", "nowhere"), "nowhere and nowhere are no certificate with its key"),
        (("--usage-db", "nowhere/usage.db"), "cannot use nowhere/usage.db as usage database"),
        (("--cors-origin", "page"), "'page' is no origin"),
        (("--tls-key", "nowhere"), "--tls-key and --tls-client-ca need --tls-cert"),
    ],
)
def test_a_door_that_can_not_close_does_not_open(flags: tuple[str, str], reason: str, small_model: Path) -> None:
    line = crossdock_command("serve", str(small_model), "--port", "0", *flags)
    ended = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    assert (ended.returncode, reason in " ".join(ended.stdout.split())) == (2, True), ended.stdout
