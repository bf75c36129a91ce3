"""Workers that do not fit the fleet are turned away with the field that differs, and nobody else notices."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq
from safetensors.torch import load_file, save_file

from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import PROTOCOL_VERSION, Envelope, Incarnation, Refused
from crossdock.core.wire_format import decode, encode
from crossdock.deploy.launch import crossdock_command
from crossdock.deploy.model_source import resolve

from .answers import ask
from .questions import Question, random_questions
from .server import Server, serving

SECONDS_TO_BE_REFUSED = 40.0
LATER_VERSION = 999


@pytest.fixture(scope="module")
def questions(small_model: Path) -> Sequence[Question]:
    return random_questions(small_model, num_questions=2, longest_prompt=100, num_tokens=24)


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(small_model, tmp_path_factory.mktemp("mismatch") / "server.log") as server:
        yield server


def other_weights(model: Path, folder: Path) -> Path:
    """The same model in another revision."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def other_config(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    return folder


def start(server: Server, model: Path, *flags: str) -> "subprocess.Popen[str]":
    address = f"--router={server.control_address}"
    command = crossdock_command("worker", str(model), address, "--role=decode", "--threads=1", *flags)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_workers_that_do_not_fit_end_with_the_difference_while_the_fleet_serves_on(
    server: Server, small_model: Path, tmp_path: Path, questions: Sequence[Question]
) -> None:
    revised = other_weights(small_model, tmp_path / "revised")
    changed = other_config(small_model, tmp_path / "changed")
    here, there, other = (resolve(str(path)).fingerprint() for path in (small_model, revised, changed))
    expected = {
        f"model differs: {here.model} at the router, {other.model} at the worker": start(server, changed),
        f"weights differs: {here.weights} in the fleet, {there.weights} at the worker": start(server, revised),
        "layout.block_size differs: 16 in the fleet, 32 at the worker": start(server, small_model, "--block-size=32"),
        "num_layer_groups differs: 4 in the fleet, 2 at the worker; "
        "layout.dtype differs: float32 in the fleet, bfloat16 at the worker": start(
            server, small_model, "--dtype=bfloat16", "--layer-groups=2"
        ),
    }
    num_asked = 0
    while any(process.poll() is None for process in expected.values()) or not num_asked:
        question = questions[num_asked % 2]
        assert ask(server, **question.body(24, stream=bool(num_asked % 3))).text == question.text(24)
        num_asked += 1
        assert num_asked < 10_000
    for reason, process in expected.items():
        printed, _ = process.communicate(timeout=SECONDS_TO_BE_REFUSED)
        assert printed.splitlines()[-1] == f"the router refuses this worker: {reason}"
        assert process.returncode == 1
        assert server.log.count(f": {reason}") == 1
    assert server.scrape().total("crossdock:workers_refused_total") == len(expected)
    assert server.scrape().worker("accepting") == 2


@pytest.mark.parametrize("told_by", ["router", "prefill", "decode"])
def test_a_process_of_another_version_is_told_so_in_words_it_understands_and_in_the_log(
    told_by: str, server: Server
) -> None:
    address = server.control_address
    if told_by != "router":
        found = re.search(rf"{told_by} worker (tcp://\S+) joined", server.log)
        assert found is not None
        address = found[1]
    with closing(Mailbox("127.0.0.1", 0, Incarnation("later"))) as later, zmq.Context() as context:
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(address)
            dealer.send_multipart([encode(Envelope(later.peer, "", LATER_VERSION)), b"a greeting of a later age"])
            assert later.poll_socket.poll(5000)
        envelope, message = later._read_frames()
        assert msgspec.msgpack.decode(envelope.bytes, type=Envelope).protocol == LATER_VERSION
        sides = ("the router", "the worker") if told_by == "router" else (address, later.peer.address)
        reason = f"protocol version differs: {PROTOCOL_VERSION} at {sides[0]}, {LATER_VERSION} at {sides[1]}"
        assert decode(message.bytes) == Refused(reason=reason)
        assert server.log.count(f"refused {later.peer.address}: {reason}") == 1


def test_the_doctor_tells_of_the_pair_and_of_who_was_refused(server: Server) -> None:
    ran = subprocess.run(
        crossdock_command("doctor", f"--router={server.url}"), capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.search(r"shm\*? +127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+ +\d+\.\d\d +\d+ us", ran.stdout)
    reason = f"protocol version differs: {PROTOCOL_VERSION} at the router, {LATER_VERSION} at the worker"
    assert reason in ran.stdout
    assert "what to do: install one version of Crossdock everywhere" in ran.stdout
    nobody = subprocess.run(crossdock_command("doctor", "--router=http://127.0.0.1:9", "--json"), capture_output=True)
    assert (nobody.returncode, json.loads(nobody.stdout)["is_well"]) == (1, False)
