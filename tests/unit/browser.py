"""A headless Chromium, driven over a pipe by the DevTools protocol: what a page does, requests and reports."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Its program, or None where it is not installed."""
_LIMIT_S = 120.0


class Browser:
    """One page in a browser of its own. Use as a context manager.

    Chromium reads commands from file 3 and writes answers and events to file 4, each ended by a zero byte.
    """

    def __init__(self, profile: Path, *, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        self._profile = profile
        self._size = (width, height)
        self._dark = dark
        self._number = 0
        self._session: str | None = None
        self._unread = b""
        self.requests: list[str] = []
        """Addresses of all requests but data URLs, the page's own included."""
        self.complaints: list[str] = []
        """Errors and warnings of the console, uncaught exceptions, and violations of the page's policy."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        width, height = self._size
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
            *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", f"--user-data-dir={self._profile}", f"--window-size={width},{height}"),
        ]
        # The shell moves the pipes to the numbers that Chromium expects.
        line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, CHROMIUM, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            self.send(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(*self._size)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events until then are taken note of."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def resize(self, width: int, height: int) -> None:
        """Give the page this size in pixels; below 600 it is a phone."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str) -> None:
        """Load a page and wait until it stands."""
        stands = f"document.readyState === 'complete' && location.href === {json.dumps(url)}"
        # A page that reloads itself may do so at this moment, and have its way.
        for _ in range(5):
            self.send("Page.navigate", url=url)
            if self._comes(stands, within_s=_LIMIT_S / 5):
                return
        raise AssertionError(f"not within {_LIMIT_S:g} s: {url}")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        assert self._comes(condition, within_s=_LIMIT_S), f"not within {_LIMIT_S:g} s: {condition}"

    def _comes(self, condition: str, *, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that match."""
        found: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        )
        return found

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches and holds the text."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        element = f"{elements}.find(e => e.textContent.includes({json.dumps(text)}))"
        assert self.evaluate(f"(() => {{ const e = {element}; if (e) e.click(); return !!e; }})()"), (selector, text)

    def enter(self, selector: str, value: str) -> None:
        """Give a field a value, as a user does."""
        events = "for (const name of ['input', 'change']) e.dispatchEvent(new Event(name, {bubbles: true}));"
        code = f"const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; {events}"
        self.evaluate(f"(() => {{ {code} }})()")

    def scripting_s(self) -> float:
        """Seconds of JavaScript since the page was loaded, parsing included."""
        metrics = {m["name"]: m["value"] for m in self.send("Performance.getMetrics")["metrics"]}
        return float(metrics["ScriptDuration"])

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Save a picture of the page (PNG), as far as the window shows it or as a whole."""
        import base64

        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(picture["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], _LIMIT_S)
            assert ready, "the browser does not answer"
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent" and not params["request"]["url"].startswith("data:"):
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
