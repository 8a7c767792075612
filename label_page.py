"""Label a dataset by hand, in the browser, a key press an answer. Needs `pip install .[label]`.

    python label_page.py data/kneeling                       # its frames, one by one
    python label_page.py data/kneeling --unit episode        # its episodes, as looping clips
    python label_page.py data/kneeling --count 200           # 200 frames, drawn at random

prints an address to open. Y says that the picture meets the task's criterion, N that it does not, S
leaves it for the end, U takes the last one back. Every answer is in the file before the next
picture comes, and the same command goes on where the last one stopped. The page is for this machine
alone: it listens on 127.0.0.1, loads nothing from anywhere else, and tells nobody anything.

`eval_epic.py epic` and `eval_epic.py success` read the file: a CSV with the columns dataset (its
id), unit (frame or episode), index, task and label (1 or 0).
"""

from __future__ import annotations

import csv
import functools
import html
import importlib.util
import io
import os
import random
import secrets
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from PIL import Image

import eval_epic
from clip_reward import UsageError
from eval_epic import LABEL_COLUMNS


@dataclass
class Label:
    """Label a dataset by hand on a local web page."""

    dataset: tyro.conf.Positional[Path]
    """folder of the dataset"""
    task: str | None = None
    """the task to judge by; default: the one that the dataset is about"""
    unit: Literal["frame", "episode"] = "frame"
    """what one answer is about: a picture, or a whole episode as a clip"""
    labels: Path | None = None
    """the file of answers; default: labels.csv in the dataset"""
    count: int | None = None
    """how many to label; default: all"""
    order: Literal["random", "dataset"] = "random"
    """random: what is labelled so far is always a fair sample; dataset: neighbours together"""
    fps: float = 10
    """pictures per second of a clip"""
    port: int | None = None
    """port on 127.0.0.1; default: a free one"""


# ------------------------------------------------------------------------------ the answers

# When an episode is a success, for the tasks where that is not "half of its steps"
EPISODE_RULES = {
    "cartpole": "from the first picture of the clip to the last",
    "mountain_car": "at any time in the clip",
    "mountain_car_continuous": "at any time in the clip",
}


class Session:
    """Which units there are, which is to be answered now, and the file of the answers.

    The file is the truth: it is replaced whole at every answer, and read again when somebody else
    has changed it. Its other rows (of other datasets and tasks) stay as they are. All methods may
    be called from any thread.

    Args:
        dataset: eval_epic.Dataset.
        task: judges.Task.
        unit: "frame" or "episode".
        path: of the CSV file; need not exist.
        count, order: as in Label.
    Raises:
        UsageError: the dataset has no such unit or lacks frames, or the file is not one of labels.
    """

    def __init__(self, dataset, task, unit, path, count=None, order="random"):
        self.dataset, self.task, self.unit = dataset, task, unit
        self.path = Path(path).resolve()  # a link to a file stays a link to it
        if unit == "episode" and dataset.meta["arguments"]["source"] != "run":
            raise UsageError(f"{dataset.folder} has single states and no episodes: --unit frame")
        for index in range(len(dataset)):
            if not dataset.frame_path(index).is_file():
                raise UsageError(
                    f"{dataset.frame_path(index)} is missing; run the same collect command again"
                )
        units = range(len(dataset)) if unit == "frame" else np.unique(dataset.episode).tolist()
        self.order = list(units)
        if order == "random":  # the same at every start, so that --count means the same units
            random.Random(dataset.meta["id"]).shuffle(self.order)
        self.order = self.order[:count]
        self._lock = threading.RLock()
        self._verdicts = {}  # {index: bool} of the judge
        self._signature = self._front = None
        self._skipped = []
        self._read()
        self._history = [(index, False) for index in self.answers]  # (index, was it a skip)

    # -------------------------------------------------------------- file

    def _stat(self):
        try:
            stat = self.path.stat()
            return stat.st_ino, stat.st_mtime_ns, stat.st_size
        except FileNotFoundError:
            return None

    def _read(self):
        """Header, rows and answers from the file, unless they are known already."""
        signature = self._stat()
        if signature is not None and signature == self._signature:
            return
        header, rows = LABEL_COLUMNS, []
        if signature:
            try:
                with open(self.path, newline="") as file:
                    header, *rows = [row for row in csv.reader(file) if row] or [[]]
            except OSError as error:
                raise UsageError(f"{self.path}: {error.strerror}") from error
            except (UnicodeDecodeError, csv.Error) as error:
                raise UsageError(f"{self.path}: not a CSV file: {error}") from error
            if not set(LABEL_COLUMNS) <= set(header):
                raise UsageError(
                    f"{self.path}: not labels; the columns are {','.join(LABEL_COLUMNS)}"
                )
            # read_labels has something to check only if there is an answer to our questions
            at = [header.index(name) for name in ("dataset", "task")]
            ours = [self.dataset.meta["id"], self.task.name]
            if any(len(row) > max(at) and [row[k] for k in at] == ours for row in rows):
                eval_epic.read_labels(self.path, self.dataset, self.task.name)
        self._take(header, rows)
        self._signature = signature

    def _take(self, header, rows):
        self._header, self._rows = header, rows
        keys = [self._key(row) for row in rows]
        index, label = header.index("index"), header.index("label")
        known = set(self.order)
        self.answers = {  # {index: bool} in the order in which they were given
            int(row[index]): row[label] == "1"
            for row, key in zip(rows, keys)
            if key == self._key() and int(row[index]) in known
        }

    def _key(self, row=None):
        """(dataset, unit, task) of a row, or ours."""
        if row is None:
            return self.dataset.meta["id"], self.unit, self.task.name
        fields = dict(zip(self._header, row))
        return tuple(fields.get(name) for name in ("dataset", "unit", "task"))

    def _write(self, rows):
        """Replace the file by these rows; they are on the disk when this returns."""
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with open(partial, "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([self._header, *rows])
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(f"not saved: {self.path}: {error.strerror}") from error
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)  # the new name as well
        os.close(folder)
        self._signature = self._stat()
        self._take(self._header, rows)

    # -------------------------------------------------------------- what the keys do

    def current(self):
        """Number of the frame or episode to be answered now; None: all are."""
        return next(iter(self.upcoming(1)), None)

    def upcoming(self, count):
        """Up to `count` numbers, that of current() first."""
        with self._lock:
            skipped = set(self._skipped)
            todo = [k for k in self.order if k not in self.answers and k not in skipped]
            todo += [k for k in self._skipped if k not in self.answers]
            if self._front in todo:
                todo.remove(self._front)
                todo.insert(0, self._front)
            return todo[:count]

    def answer(self, index, label):
        """Save that `index` meets the criterion (or not). Of what is not current: ignored.

        Raises:
            UsageError: the file cannot be written, or was spoiled meanwhile; nothing has changed.
        """
        with self._lock:
            if index is None or index != self.current():
                return  # a second press before the next picture came, or another window
            self._read()
            if index not in self.answers:
                dataset, unit, task = self._key()
                fields = dict(zip(LABEL_COLUMNS, (dataset, unit, index, task, int(label))))
                self._write([*self._rows, [str(fields.get(name, "")) for name in self._header]])
                self._history.append((index, False))
            self._front = None

    def skip(self, index):
        """Leave `index` for the end. Of what is not current: ignored."""
        with self._lock:
            if index is None or index != self.current():
                return
            self._skipped = [k for k in self._skipped if k != index] + [index]
            self._history.append((index, True))
            self._front = None

    def undo(self):
        """Take back the last answer or skip, also of an earlier session, and make it current.

        Raises:
            UsageError: as `answer`.
        """
        with self._lock:
            if not self._history:
                return
            self._read()
            index, was_skip = self._history[-1]
            if was_skip:
                self._skipped = [k for k in self._skipped if k != index]
            elif index in self.answers:
                at = self._header.index("index")
                gone = [
                    r for r in self._rows if self._key(r) == self._key() and int(r[at]) == index
                ]
                self._write([row for row in self._rows if row not in gone])
            self._history.pop()
            self._front = index

    # -------------------------------------------------------------- what it says

    @property
    def criterion(self):
        """In words, with what it means for an episode."""
        if self.unit == "frame":
            return self.task.criterion
        rule = EPISODE_RULES.get(self.task.name, "for at least half of the clip")
        return f"{self.task.criterion} Yes, if that holds {rule}."

    def last(self):
        """(index, label) of the last thing done, label None for a skip; None: nothing yet."""
        if not self._history:
            return None
        index, was_skip = self._history[-1]
        return index, None if was_skip else self.answers.get(index)

    def verdicts(self, indices):
        """The judge's [bool] on frames or episodes, by the rules of eval_epic.py success."""
        data = self.dataset
        new = [index for index in indices if index not in self._verdicts]
        if new and self.unit == "frame":
            self._verdicts.update(zip(new, self.task.judge(data.states[new]).tolist()))
        for index in new if self.unit == "episode" else ():
            rows = data.episode == index
            own = data.success[rows][0]  # by the task's own rule, where it has one
            share = self.task.judge(data.states[rows]).mean() if own < 0 else None
            self._verdicts[index] = bool(own if own >= 0 else share >= eval_epic.THRESHOLD)
        return [self._verdicts[index] for index in indices]

    def agreement(self):
        """{(yours, the judge's): how many} of all answers."""
        with self._lock:
            answers = dict(self.answers)
        table = {(mine, judge): 0 for mine in (True, False) for judge in (True, False)}
        for mine, judge in zip(answers.values(), self.verdicts(list(answers))):
            table[mine, judge] += 1
        return table

    def rows(self, index):
        """Rows of the dataset that a unit consists of, in the order of time."""
        if self.unit == "frame":
            return [index]
        rows = np.flatnonzero(self.dataset.episode == index)
        return rows[np.argsort(self.dataset.step[rows], kind="stable")].tolist()

    def image(self, index, fps=10):
        """A frame as PNG or an episode as looping animated WebP: bytes.

        Raises:
            UsageError: a damaged picture.
        """
        pictures = [Image.fromarray(self.dataset.frame(row)) for row in self.rows(index)]
        file = io.BytesIO()
        if self.unit == "frame":
            pictures[0].save(file, "PNG", compress_level=1)
        else:
            # unchanged pictures would be merged into longer ones: that is welcome here
            pictures[0].save(
                file,
                "WebP",
                save_all=True,
                append_images=pictures[1:],
                duration=round(1000 / fps),
                loop=0,
                quality=85,
                method=0,
            )
        return file.getvalue()


# ------------------------------------------------------------------------------ the page

KEYS = {"yes": "Y", "no": "N", "undo": "U", "skip": "S"}

CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
#layout { align-items: stretch; gap: 24px; }
#picture > div, .words > div { padding: 0 !important; }
.shot { background: var(--background-fill-secondary); border-radius: 14px; height: 82vh;
  min-height: 380px; display: flex; align-items: center; justify-content: center;
  overflow: hidden; border: 1px solid var(--border-color-primary); }
.shot img.now { width: 100%; height: 100%; object-fit: contain; }
.shot img.next { display: none; }
.shot .done { text-align: center; font-size: 1.25rem; line-height: 1.6; padding: 2rem; }
.shot .done b { font-size: 1.7rem; display: block; }
.ask small, .facts small { text-transform: uppercase; letter-spacing: .07em; font-size: .72rem;
  opacity: .7; display: block; }
.ask b { font-size: 1.35rem; font-weight: 600; }
.ask p { font-size: 1.06rem; line-height: 1.5; margin: .5rem 0 0; }
.facts { margin-top: 12px; display: flex; flex-direction: column; gap: 16px; line-height: 1.45; }
.facts .bar { height: 10px; border-radius: 5px; background: var(--border-color-primary);
  overflow: hidden; margin-top: 6px; }
.facts .bar div { height: 100%; background: #2563eb; transition: width .2s; }
.facts b { font-size: 1.15rem; font-weight: 600; }
.facts span { opacity: .8; font-size: .95rem; display: block; }
.gradio-container button.key { font-size: 1.1rem; font-weight: 600; min-height: 58px;
  border-radius: 12px; color: #fff; border: 0; box-shadow: none; min-width: 90px; }
.gradio-container button.key:hover { filter: brightness(1.12); }
.gradio-container button.pressed { outline: 3px solid #93c5fd; }
.gradio-container button#yes { background: #15803d; }
.gradio-container button#no { background: #b91c1c; }
.gradio-container button.key.minor { background: var(--background-fill-secondary);
  color: var(--body-text-color); border: 1px solid var(--border-color-primary); font-size: 1rem;
  min-height: 46px; }
"""

# Keys press the buttons. From a press until the next picture can be seen all others are dropped, or
# a second, hasty press would answer for a picture that nobody has looked at.
HEAD = """
<script>
(() => {
  const buttons = {y: "yes", n: "no", u: "undo", s: "skip"};
  let waiting = false;
  document.addEventListener("keydown", (event) => {
    const id = buttons[event.key.toLowerCase()];
    if (!id || event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
    document.getElementById(id)?.click();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button.key");
    if (!button) return;
    if (waiting || !document.querySelector("#picture [data-index]"))
      return event.stopImmediatePropagation();
    waiting = true;
    button.classList.add("pressed");
    button.blur();
    setTimeout(() => button.classList.remove("pressed"), 150);
  }, true);
  window.shownUnit = () => Number(document.querySelector("#picture [data-index]").dataset.index);
  window.isWaiting = () => waiting;
  window.nextIsShown = async () => {
    await new Promise((resolve) => setTimeout(resolve, 20));  // the page has changed by then
    try { await document.querySelector("#picture img.now")?.decode(); } catch (error) {}
    waiting = false;
  };
})();
</script>
"""


def picture_html(session, image, place):
    """The picture to be answered; the next one is loaded unseen, so that it comes at once.

    Args:
        image: function from a number to the bytes of its picture.
        place: path of the pictures on the server.
    """
    now, *later = session.upcoming(2) or [None]
    if now is None:
        count = len(session.order)
        inside = f"<div class=done><b>All {count} are labelled.</b>You can close this page.</div>"
    else:
        try:
            image(now)
            inside = f'<img class=now src="{place}/{now}" alt="{session.unit} {now}">'
        except UsageError as error:
            inside = f"<div class=done><b>Damaged: skip it.</b>{html.escape(str(error))}</div>"
    inside += "".join(f'<img class=next src="{place}/{k}">' for k in later)
    return f'<div class=shot data-index="{-1 if now is None else now}">{inside}</div>'


def facts_html(session):
    """Progress, agreement with the judge, and what was done last."""
    done, count = len(session.answers), len(session.order)
    blocks = [
        f"<small>Progress</small><b>{done} of {count}</b>"
        f"<div class=bar><div style='width:{100 * done / max(count, 1):.2f}%'></div></div>"
    ]
    table = session.agreement()
    if done:
        same = table[True, True] + table[False, False]
        blocks.append(
            f"<small>Agreement with the judge</small><b>{100 * same / done:.0f} %</b> "
            f"({same} of {done})<span>you yes, judge no: {table[True, False]} &nbsp;·&nbsp; "
            f"you no, judge yes: {table[False, True]}</span>"
        )
    else:
        blocks.append("<small>Agreement with the judge</small><span>no answer yet</span>")
    last = session.last()
    if last:
        said = {True: "yes", False: "no", None: "skipped"}[last[1]]
        blocks.append(f"<small>Last</small><span>{session.unit} {last[0]}: {said}</span>")
    return "<div class=facts>" + "".join(f"<div>{block}</div>" for block in blocks) + "</div>"


def ask_html(session):
    """The question."""
    what = "picture" if session.unit == "frame" else "clip"
    return (
        f"<div class=ask><small>Does the {what} show this?</small>"
        f"<b>{html.escape(session.task.name.replace('_', ' ').capitalize())}</b>"
        f"<p>{html.escape(session.criterion)}</p></div>"
    )


def make_app(session, fps, port):
    """The page as an ASGI application.

    gradio is mounted rather than launched: sharing, telemetry and the search for another address
    are all parts of `launch`, and GRADIO_SHARE or GRADIO_SERVER_NAME mean nothing here.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # is read when gradio is imported
    import gradio
    from fastapi import FastAPI, Response
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    image = functools.lru_cache(4)(lambda index: session.image(index, fps))
    place = f"/picture/{secrets.token_hex(4)}"  # no browser has another server's pictures for it
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get(place + "/{index}")
    def picture(index: int):
        if index not in session.order:
            return Response(status_code=404)
        try:
            kind = "image/png" if session.unit == "frame" else "image/webp"
            headers = {"Cache-Control": "private, max-age=3600"}
            return Response(image(index), media_type=kind, headers=headers)
        except UsageError:
            return Response(status_code=404)

    def view():
        return picture_html(session, image, place), facts_html(session)

    def press(act, index):
        try:
            act(None if index is None else int(index))
        except UsageError as error:
            raise gradio.Error(str(error)) from error
        return view()

    def answer(label, index):
        if index in session.order:
            image(index)  # nobody has seen a damaged picture
        session.answer(index, label)

    acts = {
        "yes": functools.partial(answer, True),
        "no": functools.partial(answer, False),
        "undo": lambda index: session.undo(),
        "skip": session.skip,
    }
    # the system's own font: none is fetched, not even from here
    fonts = [gradio.themes.Font(name) for name in ("system-ui", "sans-serif")]
    title = f"{session.task.name}: {session.dataset.folder.name}"
    with gradio.Blocks(analytics_enabled=False, title=title) as page:
        shown = gradio.Number(visible=False)  # filled by the browser at each press
        with gradio.Row(elem_id="layout"):
            with gradio.Column(scale=5, min_width=380):
                shot = gradio.HTML(elem_id="picture", apply_default_css=False)
            with gradio.Column(scale=3, min_width=300):
                gradio.HTML(ask_html(session), elem_classes="words", apply_default_css=False)
                buttons = {}
                for names in (("yes", "no"), ("undo", "skip")):
                    with gradio.Row():
                        for name in names:
                            minor = [] if name in ("yes", "no") else ["minor"]
                            text = f"{name.capitalize()}  ({KEYS[name]})"
                            buttons[name] = gradio.Button(
                                text, elem_id=name, elem_classes=["key", *minor], min_width=90
                            )
                facts = gradio.HTML(elem_classes="words", apply_default_css=False)
        for name, button in buttons.items():
            button.click(
                functools.partial(press, acts[name]),
                shown,
                [shot, facts],
                js="() => shownUnit()",
                queue=False,
                show_progress="hidden",
                api_visibility="private",
            ).then(None, js="() => nextIsShown()")
        page.load(view, None, [shot, facts], queue=False, api_visibility="private")
    gradio.mount_gradio_app(
        app,
        page,
        path="/",
        server_name="127.0.0.1",
        server_port=port,
        footer_links=[],
        run_history=False,
        root_path="",
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=gradio.themes.Default(font=fonts),
        css=CSS,
        head=HEAD,
    )

    async def guarded(scope, receive, send):
        """Tells the browser to load nothing from anywhere else."""

        async def send_with_policy(message):
            if message["type"] == "http.response.start":
                policy = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
                message.setdefault("headers", []).append(
                    (b"content-security-policy", policy.encode())
                )
            await send(message)

        await app(scope, receive, send_with_policy)

    # another site's page cannot reach this one through a name that it points at 127.0.0.1
    return TrustedHostMiddleware(guarded, allowed_hosts=["127.0.0.1", "localhost"])


def listen(port):
    """A socket that listens on 127.0.0.1 only. Raises UsageError if the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port or 0))
        listener.listen()
    except OSError as error:
        raise UsageError(
            f"--port {port}: {error.strerror}; without --port a free one is taken"
        ) from error
    return listener


def check_label(args: Label) -> Session:
    """Raises UsageError for what cannot work, before anything slow."""
    if importlib.util.find_spec("gradio") is None:
        raise UsageError("the labelling page needs gradio: pip install .[label]")
    if args.port is not None and not 1 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is outside 1 to 65535")
    if args.count is not None and args.count < 1:
        raise UsageError(f"--count {args.count} is less than 1")
    if not 0 < args.fps <= 100:
        raise UsageError(f"--fps {args.fps} is outside (0, 100]")
    dataset = eval_epic.load_dataset(args.dataset)
    task = eval_epic.resolve_task(args.task, dataset.meta | dataset.meta["arguments"])
    path = args.labels or args.dataset / "labels.csv"
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--labels {path}: {path.parent} is no folder that can be written to")
    return Session(dataset, task, args.unit, path, args.count, args.order)


def label(args: Label) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UsageError: no gradio, no such dataset or task, a file that is not one of labels, a port
            that is taken.
    """
    session = check_label(args)
    listener = listen(args.port)
    port = listener.getsockname()[1]
    print(f"labelling {session.unit}s of {args.dataset} for {session.task.name}: ", end="")
    print(f"{len(session.answers)} of {len(session.order)} are done; starting ..", flush=True)
    app = make_app(session, args.fps, port)
    import uvicorn

    # open pages hold a connection that never ends
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    print(f"open http://127.0.0.1:{port} and answer by key; Ctrl-C ends", flush=True)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    print(f"{len(session.answers)} of {len(session.order)} labelled, in {session.path}")


if __name__ == "__main__":
    try:
        label(tyro.cli(Label, description=__doc__))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
