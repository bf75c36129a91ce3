"""A launch captured in pieces, with a recorder in the place of torch's graphs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from crossdock.model.device_stream import CudaStream, Launch


class Recorder:
    """What is launched while a graph is captured belongs to it; else it runs."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._captured: list[str] | None = None

    def launch(self, name: str) -> None:
        (self.ran if self._captured is None else self._captured).append(name)

    def new_graph(self) -> "Graph":
        return Graph(self)

    @contextmanager
    def capture(self, graph: "Graph", pool: object, stream: object) -> Iterator[None]:
        assert self._captured is None, "one capture at a time"
        self._captured = graph.launches
        yield
        self._captured = None

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()


class Graph:
    def __init__(self, recorder: Recorder) -> None:
        self.launches: list[str] = []
        self._recorder = recorder

    def replay(self) -> None:
        self._recorder.ran += self.launches


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", recorder.stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", recorder.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", recorder.capture)
    return recorder


def capture(recorder: Recorder, launch: Launch) -> Launch:
    captured = CudaStream(torch.device("cuda", 0)).capture(launch, lambda: recorder.launch("rehearsal"))
    assert recorder.ran == ["rehearsal"]
    return captured


def test_a_captured_launch_lets_others_launch_at_the_same_places_each_time(recorder: Recorder) -> None:
    def launch(between: Callable[[], None]) -> None:
        recorder.launch("first layers")
        between()
        recorder.launch("last layers")
        between()
        recorder.launch("head")

    replay = capture(recorder, launch)
    for _ in range(2):
        recorder.ran.clear()
        replay(lambda: recorder.launch("mark"))
        assert recorder.ran == ["first layers", "mark", "last layers", "mark", "head"]


def test_a_launch_without_such_places_is_one_graph(recorder: Recorder) -> None:
    replay = capture(recorder, lambda between: recorder.launch("all"))
    replay(lambda: recorder.launch("mark"))
    assert recorder.ran == ["rehearsal", "all"]
