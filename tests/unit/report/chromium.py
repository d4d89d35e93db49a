"""A headless Chromium, spoken to in its own protocol: what a page really looks like and fetches."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WITHIN_S = 30


def find() -> str | None:
    """The browser's program, CHROMIUM if that is set."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab; `errors` of its console and `requests` it made are collected as they come."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WITHIN_S))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        kind, content = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(content["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.errors.append(json.dumps(content["args"]))
        elif kind == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.errors.append(content["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.absolute().as_uri())
        until = time.monotonic() + WITHIN_S
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def tab(program: str, profile: Path) -> Iterator[Tab]:
    """Starts the browser with an empty profile, ends it afterwards."""
    from websockets.sync.client import connect

    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    with (profile.parent / "chromium.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port_file, until = profile / "DevToolsActivePort", time.monotonic() + WITHIN_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < until, "Chromium does not start"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        yield from _connected(connect, port)
    finally:
        process.terminate()
        try:
            process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _connected(connect: Any, port: str) -> Iterator[Tab]:
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + WITHIN_S
    pages: list[dict[str, Any]] = []
    while not pages:
        assert time.monotonic() < until, "Chromium opens no tab"
        with opener.open(f"http://127.0.0.1:{port}/json", timeout=WITHIN_S) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
    with connect(pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
        yield Tab(socket)
