"""Chromium without a window, told what to do through a pipe, in the protocol of its developer tools."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

WAIT = 120


class Browser:
    """A page of a headless browser; a context, which ends the browser."""

    def __init__(self, program: str, folder: Path) -> None:
        """Start the browser with its profile in `folder`, and open an empty page."""
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        )
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        # The browser reads from the descriptor 3 and writes to 4; a shell puts them there.
        place = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", place, program, *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._numbers, self._session = (
            os.fdopen(ours_out, "wb"),
            os.fdopen(ours_in, "rb"),
            itertools.count(1),
            "",
        )
        self._rest = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._out.close()
        self._in.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the protocol; return its result. Events are passed over."""
        number = next(self._numbers)
        message = {
            "id": number,
            "method": method,
            "params": arguments,
            **({"sessionId": self._session} if self._session else {}),
        }
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            said = self._read()
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                return said["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            read = self._in.read1(1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression gives something; return that."""
        deadline = time.monotonic() + WAIT
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)
        return found

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def find() -> str | None:
    """Return the browser that is installed, if any."""
    return shutil.which("chromium") or shutil.which("google-chrome")
