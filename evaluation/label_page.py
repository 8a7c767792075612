"""Label a dataset by hand, in the browser, one key press per answer.

Y: the picture meets the task's criterion, N: it does not, S: leave it for the end, U: undo. Every
answer is saved before the next picture appears, and the same command continues where the last one
stopped. The judge's verdict is not shown: a person would learn to agree with it.

The page listens on 127.0.0.1, loads nothing from anywhere else, and answers only requests that
know the token in its URL and come from itself: other pages in the browser cannot read or press it.
"""

import base64
import contextlib
import fcntl
import functools
import html
import io
import json
import os
import random
import secrets
import string
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

from clip_reward import RunError, UsageError
from evaluation.datasets import LABEL_COLUMNS, label_rows, read_labels, write_csv
from evaluation.runs import make_scorer
from training.run import say


@contextlib.contextmanager
def locked(folder):
    """Wait for other processes that write labels to a folder, and keep them waiting meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class Session:
    """The frames or episodes (`unit`) of a dataset to label, `count` or all, and a CSV file of the
    answers. They are in the order `order`, a list of numbers, or else random and the same at every
    start, so the labelled ones are an unbiased sample. Rows on other datasets and tasks are kept.
    Raises UsageError if the dataset has no episodes, or the file does not hold labels."""

    by = ""  # the model that answers, "" for a person

    def __init__(self, dataset, task, unit="frame", path=None, count=None, order=None, seed=0):
        self.dataset, self.task, self.unit, self.path = dataset, task, unit, Path(path)
        if unit == "episode" and dataset.made.get("source") != "run":
            raise UsageError(f"{dataset.path} has single states and no episodes; use --unit frame")
        units = range(len(dataset)) if unit == "frame" else np.unique(dataset.episode).tolist()
        rng = random.Random(f"{dataset.path.stem}{seed or ''}")
        self.order = order or rng.sample(units, len(units))
        self.order = self.order[:count]
        there = self.path.exists()
        self.table = label_rows(path) if there else (LABEL_COLUMNS, {})  # the file's last content
        known = read_labels(path, dataset, task.name) if there else {}
        asked = set(self.order)
        # the numbers that were answered or skipped (None), the last at the end
        self.answers = {k: label for k, label in known.get(unit, {}).items() if k in asked}
        self.lock = threading.Lock()

    def todo(self):
        """Return the numbers of the frames or episodes still to be answered, skipped ones last."""
        skipped = [k for k, label in self.answers.items() if label is None]
        return [k for k in self.order if k not in self.answers] + skipped

    def answer(self, index, label):
        """Save whether `index` meets the criterion (bool), or leave it for the end (None). An
        answer to a picture that is no longer shown (a second press, another window) is dropped.
        Raises UsageError if `index` is never asked for, and RunError, UsageError or OSError if the
        answer cannot be saved; then nothing has changed."""
        with self.lock:
            if type(index) is not int or index not in self.order:
                raise UsageError(f"there is no {self.unit} {index!r} to answer here")
            todo = self.todo()
            if todo and index == todo[0]:
                label = label if label is None else self._save(index, label)
                self.answers.pop(index, None)
                self.answers[index] = label

    def undo(self):
        """Take back the last answer or skip, even one of an earlier session."""
        with self.lock:
            if self.answers:
                last = [*self.answers][-1]
                if self.answers[last] is not None:
                    self._save(last, None)
                del self.answers[last]

    def _save(self, index, label):
        """Save an answer, or take it back (None) -> the answer in the file. What others answered
        meanwhile stays, but a person's answer replaces a model's. A file that was removed meanwhile
        is written again, with all its rows."""
        with locked(self.path.parent):
            columns, rows = label_rows(self.path) if self.path.exists() else self.table
            values = (self.dataset.path.stem, self.unit, str(index), self.task.name)
            ours = dict(zip(LABEL_COLUMNS, values))
            there = [row for row in rows.values() if not ours.items() - row.items()]
            if there and label is not None and (self.by or not there[-1].get("by")):
                return there[-1]["label"] == "1"
            columns = [*columns, "by"] if self.by and "by" not in columns else columns
            rows = [row for row in rows.values() if row not in there]
            rows += [] if label is None else [ours | {"label": str(int(label)), "by": self.by}]
            write_csv(self.path, columns, rows)
            self.table = columns, dict(enumerate(rows))
        return label

    def data_url(self, index, render):
        """Return a frame (PNG) or an episode (looping WebP, 10 frames a second) as a data: URL."""
        rows = [index] if self.unit == "frame" else self.dataset.rows(index)
        first, *others = map(Image.fromarray, render(self.dataset.states[rows]))
        file, kind = io.BytesIO(), "png" if self.unit == "frame" else "webp"
        first.save(file, kind, save_all=True, append_images=others, duration=100, loop=0, method=0)
        data = base64.b64encode(file.getvalue()).decode()
        return f"data:image/{kind};base64,{data}"


BUTTONS = {"yes": True, "no": False, "skip": None}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; connect-src 'self'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the URL is secret
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """The page on a port of 127.0.0.1 (0: a free one), as `url` says. Its pictures are drawn by
    `scorer` in the executor `drawing`."""

    def __init__(self, session, drawing, scorer, port=0):
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}") from error
        self.session, self.path = session, f"/{secrets.token_urlsafe()}"
        self.url = f"http://127.0.0.1:{self.server_port}{self.path}"
        task, unit = session.task, session.unit
        rule = f" Yes if that holds {task.episode_rule}." if unit == "episode" else ""
        words = {"name": task.name, "unit": unit, "criterion": task.criterion + rule}
        page = string.Template(Path(__file__).with_suffix(".html").read_text())
        self.page = page.substitute({name: html.escape(text) for name, text in words.items()})
        # pictures are large, for a person, whatever size CLIP was shown
        draw = functools.partial(scorer.render, size=480)
        self.image = functools.lru_cache(8)(lambda k: drawing.submit(session.data_url, k, draw))

    def view(self):
        """Return what the page shows now: {"picture": HTML, "progress": text}."""
        todo, count = self.session.todo(), len(self.session.order)
        end = f"<h2 data-index=-1>All {count} are labelled. You can close this page.</h2>"
        images = [self.image(index) for index in todo[:2]]  # draws the next one meanwhile
        picture = f'<img data-index={todo[0]} src="{images[0].result()}">' if images else end
        return {"picture": picture, "progress": f"{count - len(todo)} of {count}"}


class Handler(BaseHTTPRequestHandler):
    """GET returns the page. POST of {"button": its name or "show", "index": the number that is
    shown} does what the button says -> `PageServer.view`, or {"error": text}."""

    timeout = 10  # seconds for a request: all are small

    def allowed(self):
        """Return whether a request is for this URL and, if it may change something, from this page.
        A foreign host name that somebody points at this machine is refused."""
        host = self.headers.get("Host", "")
        ours = host.split(":")[0] in ("127.0.0.1", "localhost")
        itself = self.command == "GET" or self.headers.get("Origin") == f"http://{host}"
        known = secrets.compare_digest(self.path.encode(), self.server.path.encode())
        return ours and itself and known

    def do_GET(self):
        if self.allowed():
            self.reply(200, "text/html; charset=utf-8", self.server.page)
        else:
            self.reply(403, "text/plain", "Open the URL that eval_epic.py label printed.")

    def do_POST(self):
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not self.allowed() or not 0 < length <= 1000:
                return self.reply(403, "text/plain", "refused")
            request = json.loads(self.rfile.read(length))
            button, index = request["button"], request["index"]
            session = self.server.session
            if button == "undo":
                session.undo()
            elif button != "show":
                session.answer(index, BUTTONS[button])
            status, view = 200, self.server.view()
        except (UsageError, RunError, OSError) as error:
            status, view = 409, {"error": f"That was not saved: {error}"}
        except (ValueError, KeyError, TypeError, RecursionError):
            status, view = 400, {"error": "That request is not from this page."}
        self.reply(status, "application/json", json.dumps(view))

    def reply(self, status, kind, text):
        with contextlib.suppress(OSError):  # the browser has gone
            self.send_response(status)
            for name, value in (HEADERS | {"Content-Type": kind}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_):
        """Print nothing."""


def serve(session, port=0):
    """Serve the page until Ctrl-C."""
    total, dataset = len(session.order), session.dataset
    say(f"labelling {session.unit}s of {dataset.path} for {session.task.name}: "
        f"{len(session.answers)} of {total} are done; starting")  # fmt: skip
    with ThreadPoolExecutor(1) as drawing:  # a GL context belongs to one thread
        pictures = drawing.submit(make_scorer, dataset.args).result()
        with PageServer(session, drawing, pictures, port) as server:
            say(f"open {server.url} and answer by key press; Ctrl-C ends the session")
            ssh = f"ssh -NL {server.server_port}:127.0.0.1:{server.server_port} THIS_MACHINE"
            say(f"for a browser on another machine, first type there: {ssh}")
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        drawing.submit(pictures.close).result()
    say(f"{total - len(session.todo())} of {total} are labelled, in {session.path}")
