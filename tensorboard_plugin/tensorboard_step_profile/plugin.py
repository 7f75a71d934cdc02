"""The tab STEP PROFILE: TensorBoard's side of it, which passes questions on to
analysis/report/tab.py in the checkout.

That runs as a process of its own, so TensorBoard loads nothing of the analysis and goes on while a
trace is read.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from importlib import metadata, util
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

HERE = Path(__file__).resolve().parent
ROUTES = ("runs", "page", "progress", "timeline", "compare")  # methods of analysis.report.tab.Tab
ENDED = (
    "the process that reads traces has ended: out of memory? TensorBoard's terminal shows what it"
    " printed"
)


def checkout() -> Path:
    """The workshop that this was installed from: pip notes the folder (PEP 610), whether editable
    or not."""
    noted = metadata.distribution("tensorboard-step-profile").read_text("direct_url.json")
    return Path(url2pathname(urlsplit(json.loads(noted)["url"]).path)).parent


class Reader:
    """The process that reads documents and traces.  The first question starts it; so does one after
    it has ended."""

    def __init__(self, logdir: str):
        """logdir: an absolute path."""
        self.command = [sys.executable, "-m", "analysis.report.tab", logdir]
        self.process: subprocess.Popen | None = None
        self.waiting: dict[int, Future[bytes]] = {}
        self.asked = 0
        self.lock = Lock()

    def ask(self, route: str, parameters: dict[str, str]) -> bytes:
        """The answer as JSON, whenever it comes: TensorBoard has a thread for each request."""
        answer: Future[bytes] = Future()
        try:
            with self.lock:
                if self.process is None or self.process.poll() is not None:
                    self.start()
                self.asked += 1
                self.waiting[self.asked] = answer
                question = {"id": self.asked, "route": route, "parameters": parameters}
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                self.process.stdin.flush()
        except OSError as error:  # the checkout was moved, or there is no memory for a process
            return json.dumps(
                {"error": f"cannot start the process that reads traces: {error}"}
            ).encode()
        return answer.result()

    def start(self) -> None:
        # Ctrl-C is for TensorBoard; this process ends when its input does.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        self.process = subprocess.Popen(self.command, cwd=checkout(), **pipes)
        self.waiting = {}
        Thread(target=self.listen, args=(self.process, self.waiting), daemon=True).start()

    def listen(self, process: subprocess.Popen, waiting: dict[int, Future[bytes]]) -> None:
        for line in process.stdout:
            number, _, answer = line.partition(b" ")
            waiting.pop(int(number)).set_result(answer)
        process.wait()
        for answer in list(waiting.values()):
            answer.set_result(json.dumps({"error": ENDED}).encode())


class StepProfile(base_plugin.TBPlugin):
    plugin_name = "step_profile"

    def __init__(self, context: base_plugin.TBContext):
        self.logdir = context.logdir
        self.reader = Reader(os.path.abspath(os.path.expanduser(self.logdir)))

    def is_active(self) -> bool:
        return bool(
            self.logdir
        )  # at once: TensorBoard asks again and again, and waits for the answer

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Step profile")

    def get_plugin_apps(self) -> dict:
        report = checkout() / "analysis" / "report"
        files = [HERE / "index.js", HERE / "timeline.js", report / "page.js", report / "page.css"]
        plotly = util.find_spec("plotly")  # not imported: that takes seconds
        if plotly:
            files.append(Path(plotly.origin).parent / "package_data" / "plotly.min.js")
        apps = {f"/{path.name}": self.file_app(path) for path in files}
        for route in ROUTES:
            apps[f"/{route}"] = self.question_app(route)
        return apps

    def file_app(self, path: Path):
        kind = "text/css" if path.suffix == ".css" else "text/javascript"

        @Request.application
        def serve(request: Request) -> Response:
            return http_util.Respond(request, path.read_bytes(), kind, expires=60)

        return serve

    def question_app(self, route: str):
        @Request.application
        def serve(request: Request) -> Response:
            return http_util.Respond(
                request, self.reader.ask(route, request.args.to_dict()), "application/json"
            )

        return serve
