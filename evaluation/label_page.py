"""Label a dataset by hand, in the browser, one key press per answer. Needs gradio.

Y: the picture meets the task's criterion, N: it does not, S: leave it for the end, U: undo. Every
answer is saved before the next picture appears, and the same command continues where the last one
stopped. The page listens on 127.0.0.1 and loads nothing from anywhere else. The judge's verdict is
not shown: a person would learn to agree with it.
"""

import base64
import functools
import io
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from clip_reward import UsageError
from evaluation.datasets import LABEL_COLUMNS, label_rows, read_labels, write_csv
from evaluation.runs import make_scorer
from training.run import say


class Session:
    """The frames or episodes (`unit`) of a dataset to label, `count` or all, and the CSV file of
    answers. Their order is random and the same at every start: what is labelled so far is a fair
    sample; or it is `order`, a list of their numbers. Rows of the file on other datasets and tasks
    are kept. Raises UsageError if the dataset has no episodes, or the file does not hold labels."""

    by = ""  # the model that answers, "" for a person

    def __init__(self, dataset, task, unit="frame", path=None, count=None, order=None, seed=0):
        self.dataset, self.task, self.unit, self.path = dataset, task, unit, Path(path)
        if unit == "episode" and dataset.made.get("source") != "run":
            raise UsageError(f"{dataset.path} has single states and no episodes: --unit frame")
        units = range(len(dataset)) if unit == "frame" else np.unique(dataset.episode).tolist()
        rng = random.Random(f"{dataset.path.stem}{seed or ''}")
        self.order = order or rng.sample(units, len(units))
        self.order = self.order[:count]
        known = read_labels(path, dataset, task.name) if self.path.exists() else {}
        asked = set(self.order)
        # what was answered, or skipped (None), the last at the end
        self.answers = {k: label for k, label in known.get(unit, {}).items() if k in asked}
        self.lock = threading.Lock()

    def todo(self):
        """Return the numbers of the frames or episodes still to be answered, skipped ones last."""
        skipped = [k for k, label in self.answers.items() if label is None]
        return [k for k in self.order if k not in self.answers] + skipped

    def answer(self, index, label):
        """Save whether `index` meets the criterion, or leave it for the end (None). An answer to a
        picture that is no longer shown is dropped: a second press, or another window. Raises
        RunError or UsageError if it cannot be saved; then nothing has changed."""
        with self.lock:
            todo = self.todo()
            if todo and index == todo[0]:
                self._save(index, label)
                self.answers.pop(index, None)
                self.answers[index] = label

    def undo(self):
        """Take back the last answer or skip, even one of an earlier session."""
        with self.lock:
            if self.answers:
                self._save(last := [*self.answers][-1], None)
                del self.answers[last]

    def _save(self, index, label):
        columns, rows = label_rows(self.path) if self.path.exists() else (LABEL_COLUMNS, {})
        values = (self.dataset.path.stem, self.unit, str(index), self.task.name)
        ours = dict(zip(LABEL_COLUMNS, values))
        there = [row for row in rows.values() if not ours.items() - row.items()]
        if self.by and there:  # somebody answered meanwhile
            return
        columns = [*columns, "by"] if self.by and "by" not in columns else columns
        rows = [row for row in rows.values() if row not in there]
        rows += [] if label is None else [ours | {"label": int(label), "by": self.by}]
        write_csv(self.path, columns, rows)

    def data_url(self, index, render):
        """Return as data: URL a frame (PNG) or an episode (looping WebP, ten frames a second)."""
        rows = [index] if self.unit == "frame" else self.dataset.rows(index)
        first, *others = map(Image.fromarray, render(self.dataset.states[rows]))
        file, kind = io.BytesIO(), "png" if self.unit == "frame" else "webp"
        first.save(file, kind, save_all=True, append_images=others, duration=100, loop=0, method=0)
        data = base64.b64encode(file.getvalue()).decode()
        return f"data:image/{kind};base64,{data}"

    def image(self, index, render):
        """Return HTML of a frame or episode."""
        return f'<img data-index={index} src="{self.data_url(index, render)}">'


CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
#picture img { height: 82vh; width: 100%; object-fit: contain; }
#yes { background: #15803d; color: white; } #no { background: #b91c1c; color: white; }
"""
HEAD = """<script>
document.addEventListener("keydown", (event) => {
  const id = {y: "yes", n: "no", u: "undo", s: "skip"}[event.key.toLowerCase()];
  if (id && !event.repeat && !event.ctrlKey && !event.altKey && !event.metaKey)
    document.getElementById(id)?.click();
});
</script>"""
SHOWN = "() => Number(document.querySelector('#picture [data-index]').dataset.index)"


def make_page(gradio, session, drawing, scorer):
    """Make the page (gradio.Blocks), whose pictures `scorer` draws in the executor `drawing`."""

    @functools.lru_cache(8)
    def image(index):  # large, for a person, whatever CLIP was shown
        return drawing.submit(session.image, index, functools.partial(scorer.render, size=480))

    def view():
        todo, count = session.todo(), len(session.order)
        words = f"**{count - len(todo)} of {count}**"
        if not todo:
            end = f"All {count} are labelled. You can close this page."
            return f"<h2 data-index=-1>{end}</h2>", words
        now, *_ = [image(index) for index in todo[:2]]  # draws the next one meanwhile
        return now.result(), words

    def press(label, index):
        session.undo() if label == "undo" else session.answer(int(index), label)
        return view()

    task = session.task
    rule = f" Yes if that holds {task.episode_rule}." if session.unit == "episode" else ""
    question = f"### Does the {session.unit} show this: {task.name}?\n{task.criterion}{rule}"
    with gradio.Blocks(title=task.name) as page:
        shown = gradio.Number(visible=False)  # what the person sees, filled in by the browser
        with gradio.Row():
            with gradio.Column(scale=5):
                picture = gradio.HTML(elem_id="picture")
            with gradio.Column(scale=3):
                gradio.Markdown(question)
                words = gradio.Markdown()
                for key, label in {"yes": True, "no": False, "skip": None, "undo": "undo"}.items():
                    button = gradio.Button(f"{key} ({key[0].upper()})", elem_id=key)
                    act = functools.partial(press, label)
                    button.click(act, shown, [picture, words], js=SHOWN, show_progress="hidden")
        page.load(view, None, [picture, words])
    return page


def serve(session):
    """Serve the page on a free port of 127.0.0.1 until Ctrl-C. Raises UsageError without gradio."""
    # no telemetry; `launch` returns at once, and checks without a proxy that the page is up
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "no", "GRADIO_DEBUG": "0", "no_proxy": "127.0.0.1"}
    try:
        import gradio
    except ImportError as error:
        raise UsageError("the labelling page needs gradio: pip install .[label]") from error

    fonts = [gradio.themes.Font("sans-serif")]  # the default ones are fetched
    options = {"theme": gradio.themes.Default(font=fonts, font_mono=fonts), "css": CSS}
    options |= {"head": HEAD, "footer_links": [], "run_history": False, "ssr_mode": False}
    options |= {"share": False, "server_name": "127.0.0.1", "quiet": True}
    total, dataset = len(session.order), session.dataset
    say(f"labelling {session.unit}s of {dataset.path} for {session.task.name}: "
        f"{len(session.answers)} of {total} are done; starting")  # fmt: skip
    with ThreadPoolExecutor(1) as drawing:  # a GL context belongs to one thread
        pictures = drawing.submit(make_scorer, dataset.args).result()
        page = make_page(gradio, session, drawing, pictures)
        # show_error: if an answer could not be saved
        page.launch(prevent_thread_lock=True, show_error=True, **options)
        say(f"open {page.local_url} and answer by key; Ctrl-C ends")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            page.close(verbose=False)
        drawing.submit(pictures.close).result()
    say(f"{total - len(session.todo())} of {total} labelled, in {session.path}")
