"""A server to be measured is started, asked when it answers, and gone afterwards."""

import os
import sys
from pathlib import Path

import pytest

from crossdock.benchmarks.servers import Server, measure
from crossdock.benchmarks.workload import LoadRequest

SCRIPT = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\\n\\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("process", os.getpid(), os.environ["FLAVOUR"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_load_is_measured_and_the_process_gone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = (sys.executable, "-c", SCRIPT, "{port}")
    server = Server("small", command, environment={"FLAVOUR": "plain"})
    served = measure(server, (LoadRequest("x", 1), LoadRequest("y", 1)), log)
    assert (served.report.num_requests, served.report.output_tokens) == (2, 2)
    assert served.ready_seconds > 0
    word, process, flavour = log.read_text().splitlines()[0].split()
    assert (word, flavour) == ("process", "plain")
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    server = Server("broken", (sys.executable, "-c", "raise SystemExit('no such model')"))
    with pytest.raises(RuntimeError, match="no such model"):
        measure(server, (LoadRequest("x", 1),), tmp_path / "log")
