"""A headless Chromium, spoken to over a pipe, and a stand-in for what a page would fetch from the
internet."""

import base64
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --window-size=1400,1100"
).split()

# All text that a reader sees: in shadow roots and frames too.
TEXT = """
(() => {
  const seen = [];
  const walk = node => {
    if (node.nodeType === 3) { seen.push(node.textContent); return; }
    if (["STYLE", "SCRIPT", "TEMPLATE", "NOSCRIPT"].includes(node.nodeName)) return;
    if (node.shadowRoot) walk(node.shadowRoot);
    if (node.nodeName === "IFRAME" && node.contentDocument) walk(node.contentDocument);
    node.childNodes.forEach(walk);
  };
  walk(document);
  return seen.join(" ").replace(/\\s+/g, " ");
})()
"""

# The frame that shows: TensorBoard keeps those of other tabs.
FRAME = """
(() => {
  const walk = node => [...node.querySelectorAll("*")].flatMap(one =>
    [...(one.nodeName === "IFRAME" ? [one] : []), ...(one.shadowRoot ? walk(one.shadowRoot) : [])]);
  return walk(document).find(frame => frame.getBoundingClientRect().width > 0);
})()
"""


class Browser:
    """with Browser(folder) as browser: browser.open(url); browser.text_with("words")"""

    def __init__(self, profile):
        self.profile = profile

    def __enter__(self):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def as_3_and_4():  # where Chromium expects the pipe
            ends = [os.dup(to_browser), os.dup(from_browser)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [
                CHROMIUM, *QUIET, f"--user-data-dir={self.profile}",
                "--remote-debugging-pipe", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
            preexec_fn=as_3_and_4,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session = b"", 0, None
        self.requests = []  # addresses that pages asked for, once there was call("Network.enable")
        # What a page's scripts threw or wrote to the console, once there was call("Runtime.enable")
        self.errors = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        os.close(self.write_end)
        os.close(self.read_end)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                data = os.read(self.read_end, 1 << 16)
                assert data, "the browser has gone"
                self.buffer += data
            line, self.buffer = self.buffer.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") in (
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
            ):
                self.errors.append(answer["params"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, url):
        self.call(
            "Page.navigate", url="about:blank"
        )  # a change of the part after # alone would load nothing
        self.call("Page.navigate", url=url)
        self.until(
            "document.readyState === 'complete'"
        )  # scripts that wait for the whole page have run

    def run(self, script):
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return result["result"].get("value")

    def in_tab(self, script):
        """The value of an expression in the frame of a plugin of TensorBoard."""
        return self.run(
            f"((document, window) => {script})(({FRAME}).contentDocument, ({FRAME}).contentWindow)"
        )

    def text_with(self, *words, timeout=60):
        """The page's text, once it holds all the words; else fails with what it holds."""
        until = time.monotonic() + timeout
        while True:
            text = self.run(TEXT) or ""
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            assert time.monotonic() < until, f"{missing} did not come up in: {text[:1500]}"
            time.sleep(0.3)

    def until(self, condition, timeout=60):
        """Waits for an expression to be true."""
        until = time.monotonic() + timeout
        while not self.run(condition):
            assert time.monotonic() < until, condition
            time.sleep(0.2)

    def mouse(self, kind, x, y, **how):
        """A real event of the mouse: mouseMoved, mousePressed or mouseReleased."""
        if kind != "mouseMoved":
            how = {"button": "left", "clickCount": 1, **how}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **how)

    def click(self, x, y):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def drag(self, first, last, y, **how):
        """From one x to another, with what else is pressed: modifiers=8 is Shift."""
        self.mouse("mouseMoved", first, y)
        self.mouse("mousePressed", first, y, **how)
        for share in (0.3, 0.7, 1.0):
            self.mouse("mouseMoved", first + share * (last - first), y, buttons=1, **how)
        self.mouse("mouseReleased", last, y, **how)

    def press(self, *keys):
        """Real keys, one after another, to whatever has the focus: letters or names as Enter."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key)
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width, height=1000):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        time.sleep(0.5)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


CHARTS = "https://www.gstatic.com/charts/loader.js"
STAND_IN = """
(() => {
  class Chart {
    constructor(element) { this.element = element; this.rows = 0; }
    addRow() { this.rows++; }
    addRows(rows) { this.rows += rows.length || 0; }
    draw(data) {
      this.element.textContent = `${this.kind} of ${data.rows} rows`;
    }
    getSelection() { return []; }
  }
  for (const name of ["addColumn", "clearChart", "setSelection", "setProperty"])
    Chart.prototype[name] = function () {};
  const kinds = {
    arrayToDataTable: rows => Object.assign(new Chart(), {rows: rows.length - 1}),
    events: {
      addListener() {}, removeListener() {}, removeAllListeners() {}, addOneTimeListener() {},
    },
  };
  window.google = {
    charts: {load: () => Promise.resolve(), setOnLoadCallback: f => setTimeout(f, 0)},
    visualization: new Proxy(kinds, {
      get: (all, name) => all[name] || (
        all[name] = class extends Chart { get kind() { return String(name); } }
      ),
    }),
  };
})();
"""


class Proxy:
    """A server before TensorBoard's that answers for the chart script, so that the page needs no
    internet."""

    def __init__(self, upstream):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/stand_in.js":
                    return self.answer(200, "text/javascript", STAND_IN.encode())
                try:
                    with urllib.request.urlopen(upstream + self.path, timeout=60) as found:
                        status, kind, body = (
                            found.status,
                            found.headers["Content-Type"],
                            found.read(),
                        )
                        encoding = found.headers.get("Content-Encoding")
                except urllib.error.HTTPError as error:
                    status, kind, body, encoding = (
                        error.code,
                        error.headers["Content-Type"],
                        error.read(),
                        None,
                    )
                body = body.replace(CHARTS.encode(), b"/stand_in.js")
                return self.answer(status, kind, body, encoding)

            def answer(self, status, kind, body, encoding=None):
                self.send_response(status)
                self.send_header("Content-Type", kind or "text/plain")
                if encoding:
                    self.send_header("Content-Encoding", encoding)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()
