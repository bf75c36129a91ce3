"""Headless Chromium under test, spoken to over a pipe in the DevTools protocol; no driver and no package is needed.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
PATIENCE_SECONDS = 30.0

Json = dict[str, Any]


class Chromium:
    """One browser with one page; ``complaints`` are its console's errors and warnings, and scripts that failed."""

    def __init__(self, profile: Path) -> None:
        assert EXECUTABLE is not None, "tests that need a browser are skipped without one"
        self.complaints: list[str] = []
        self._num_sent = 0
        self._buffer = b""
        self._session: str | None = None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._process = _start(profile, to_browser, from_browser)
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> Json:
        """One command and its result; fails the test where the browser refuses it."""
        self._num_sent += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._num_sent, "method": method, "params": params, **session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._num_sent:
                assert "error" not in message, message["error"]
                result: Json = message["result"]
                return result

    def _receive(self) -> Json:
        while b"\0" not in self._buffer:
            assert select([self._read], [], [], PATIENCE_SECONDS)[0], "the browser does not answer"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser is gone"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: Json = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: Json) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"].get("exception", params)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(lambda: self.evaluate("document.readyState") == "complete")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a script that throws fails the test."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a reader sees in the first element that matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def wait_for(self, holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"it did not come about; the browser says {self.complaints}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, is_dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(20)


def _start(profile: Path, to_browser: int, from_browser: int) -> "subprocess.Popen[bytes]":
    """The browser reads commands from its descriptor 3 and answers on 4, wherever these pipes lie here."""
    plumbing = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    return subprocess.Popen(
        [
            "bash",
            "-c",
            plumbing,
            "bash",
            str(EXECUTABLE),
            *FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ],
        pass_fds=(to_browser, from_browser),
        stderr=subprocess.DEVNULL,
    )
