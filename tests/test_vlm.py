"""Labels from a vision-language model, which a small server here plays: it knows the judge."""

import base64
import csv
import gc
import io
import json
import re
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

import dqn_clip_classic as dqn
import eval_epic
from clip_reward import RunError, UsageError
from environments import judges
from evaluation import datasets, vlm
from evaluation.rewards import Prompts as PromptRewards
from evaluation.runs import make_scorer

KEY = "sk-a-secret-that-nobody-may-read"


class Model(BaseHTTPRequestHandler):
    """One request: find out which state the picture shows, and answer as `server` is told to."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, status, body, kind="application/json"):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After-Ms", "20")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        server = self.server
        with server.lock:
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        finally:
            with server.lock:
                server.open -= 1

    def respond(self, asked):
        server, (image, text) = self.server, asked["messages"][0]["content"]
        url = image["image_url"]["url"]
        png = base64.b64decode(re.fullmatch(r"data:image/png;base64,(.*)", url)[1])
        shown = np.asarray(Image.open(io.BytesIO(png)))
        index = server.pictures[shown.tobytes()]
        with server.lock:
            attempt = server.asked[index]
            server.asked[index] += 1
            server.bodies.append((asked, text["text"], shown.shape, self.headers))
        fault = server.faults.get(index, [])
        fault = fault[attempt] if attempt < len(fault) else None
        time.sleep(server.delay)
        if server.asked.total() <= 8 and server.together:
            server.together.wait(30)  # fails unless eight requests come at once
        if self.path != "/v1/chat/completions":
            return self.send(404, {"error": {"message": "no such path"}})
        if not server.structured and {"response_format", "temperature"} & set(asked):
            return self.send(400, {"error": {"message": "response_format is unknown"}})
        if isinstance(fault, int):  # such a server repeats the key
            echo = f"no {self.headers['Authorization']}"
            return self.send(fault, {"error": {"message": echo}})
        if fault == "cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            self.close_connection = True
            return self.connection.close()
        if fault in ("no JSON", "html"):
            kind = "application/json" if fault == "no JSON" else "text/html"
            return self.send(200, "<html>yes</html>", kind)
        content = fault or ("yes" if server.verdicts[index] else "no")
        if server.structured and fault is None:
            content = json.dumps({"answer": content})
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.send(200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
                  | {"choices": [choice], "usage": usage})  # fmt: skip


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """48 CartPole states: [0, 24) fail the judge's rule, [24, 48) pass."""
    states = np.zeros((48, 4))
    states[:, 0] = np.linspace(-1, 1, 48)
    states[:, 2] = np.concatenate([np.linspace(0.5, 3, 24), np.linspace(-0.2, 0.2, 24)])
    path = tmp_path_factory.mktemp("data") / "cartpole.npz"
    made = datasets.Dataset(dqn.Args(render_size=48), {"source": "uniform"}, states)
    datasets.save_dataset(made, path)
    return path


@pytest.fixture(scope="module")
def pictures(frames):
    """{bytes of the picture that somebody should see: number of the state}."""
    data = datasets.load_dataset(frames)
    with closing(make_scorer(data.args)) as scorer:
        shown = [picture.tobytes() for picture in scorer.render(data.states, 480)]
    assert len(set(shown)) == 48
    return {picture: index for index, picture in enumerate(shown)}


@pytest.fixture
def server(pictures, monkeypatch):
    """The model: .verdicts are its answers, .faults = {state: [what goes wrong, first to last]}."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.daemon_threads, server.lock = True, threading.Lock()
    server.pictures, server.verdicts = pictures, [index >= 24 for index in range(48)]
    server.structured, server.delay, server.faults = True, 0.0, {}
    server.open, server.most_open, server.together = 0, 0, None
    server.asked, server.bodies = Counter(), []
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def label(frames, server, path, **flags):
    flags = {"by": "tiny-vlm", "url": server.url, "labels": str(path)} | flags
    eval_epic.Label(dataset=frames, **flags)()


def read(path):
    """{index: (label, by)} of a file of labels, read with nothing but the csv module."""
    with open(path, newline="") as file:
        return {int(row["index"]): (row["label"], row["by"]) for row in csv.DictReader(file)}


def test_a_model_labels_what_nobody_has_labelled(frames, server, tmp_path, capsys, monkeypatch):
    """The question, picture and order are a person's; a person's answers stay."""
    path = tmp_path / "labels.csv"
    path.write_text("dataset,unit,index,task,label\ncartpole,frame,30,cartpole,0\n")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.together = threading.Barrier(8)
    label(frames, server, path)
    given = read(path)
    assert given.pop(30) == ("0", "")  # the model would have said 1
    assert server.asked == Counter(list(given))  # each once, and not 30
    expected = {k: ("1" if k >= 24 else "0", "tiny-vlm") for k in range(48) if k != 30}
    assert given == expected
    assert server.most_open == 8
    asked, text, shape, headers = server.bodies[0]
    assert judges.TASKS["cartpole"].criterion in text and min(shape[:2]) >= 336
    assert asked["model"] == "tiny-vlm" and asked["temperature"] == 0
    assert asked["response_format"]["json_schema"]["strict"] is True
    assert headers["Authorization"] == f"Bearer {KEY}"
    said = capsys.readouterr()
    counts = "23 yes, 24 no, 0 unsure, 0 unreadable, 47 calls, 4700 tokens"
    assert f"47 of 47: {counts}\n" in said.out
    everything = said.out + said.err + "".join(p.read_text() for p in tmp_path.glob("*"))
    assert KEY not in everything
    label(frames, server, path)  # nothing is left to ask
    assert server.asked.total() == 47


def test_the_order_is_that_of_a_person_and_can_be_seeded(frames, server, tmp_path):
    orders = []
    for seed in (0, 0, 1):
        path = tmp_path / f"{len(orders)}.csv"
        label(frames, server, path, count=6, seed=seed, question="Is the pole up?")
        orders.append(list(read(path)))
    person = eval_epic.Label(dataset=frames, count=6, labels=str(tmp_path / "x.csv")).session()
    assert orders[0] == orders[1] == person.order != orders[2]
    assert all("Is the pole up?" in text for _, text, _, _ in server.bodies)
    assert judges.TASKS["cartpole"].criterion not in server.bodies[0][1]


def test_faults_that_pass_are_repeated_and_unreadable_answers_are_skipped(
    frames, server, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(vlm, "TIMEOUT_S", 5)
    server.faults = {1: [429, 429], 2: [500], 3: ["cut"], 4: [503, "cut", 429]}
    garbage = ["no JSON", "html", "Yes, or no?", '{"answer": 1}', '{"a": ' * 3, "unsure"]
    server.faults |= {10 + k: [text] for k, text in enumerate(garbage)}
    server.faults |= {20: ["<think>no, no</think>\nNo."], 30: ['```json\n{"answer": "YES"}\n```']}
    label(frames, server, path := tmp_path / "labels.csv")
    skipped = set(range(10, 16))
    assert {k: int(good) for k, (good, _) in read(path).items()} == {
        k: int(k >= 24) for k in range(48) if k not in skipped
    }
    assert [server.asked[k] for k in (1, 2, 3, 4, 5, 10)] == [3, 2, 2, 4, 1, 1]
    said = capsys.readouterr().out
    assert "48 of 48: 24 yes, 18 no, 1 unsure, 5 unreadable, 55 calls" in said
    server.faults = {}
    label(frames, server, path)  # asks again about the skipped ones, and about no other
    assert len(read(path)) == 48 and server.asked.total() == 55 + 6


def test_a_server_without_structured_output_is_asked_plainly(frames, server, tmp_path):
    server.structured = False
    label(frames, server, path := tmp_path / "labels.csv", count=20)
    assert len(read(path)) == 20
    plain = ["response_format" not in asked for asked, *_ in server.bodies]
    assert sum(plain) == 20 and len(plain) <= 28 and all(plain[-12:])
    assert server.bodies[0][3]["Authorization"] == "Bearer none"  # a placeholder


def test_what_fails_for_good_ends_in_one_line_and_keeps_the_answers(
    frames, server, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    path = tmp_path / "labels.csv"
    order = eval_epic.Label(dataset=frames, labels=str(path)).session().order

    def refused(**flags):
        with pytest.raises((RunError, UsageError)) as error:
            label(frames, server, path, **flags)
        assert "\n" not in str(error.value) and KEY not in repr(error.value)
        assert error.value.__cause__ is None or isinstance(error.value.__cause__, ImportError)
        return str(error.value)

    server.faults = {k: [401] for k in order[10:14]}
    assert "401" in (said := refused()) and "***" in said and "same command" in said
    assert list(read(path)) == order[:10]
    gc.collect()  # asyncio logs the exceptions of tasks that nobody awaited
    assert not [record for record in caplog.records if record.name == "asyncio"]
    server.faults = {k: ["I cannot see pictures."] for k in range(48)}
    server.asked.clear()
    assert "I cannot see pictures" in refused()
    assert server.asked.total() <= 16 and list(read(path)) == order[:10]
    monkeypatch.setattr(vlm, "RETRIES", 0)
    assert "onnect" in refused(url="http://127.0.0.1:9/v1")
    server.delay = 1
    monkeypatch.setattr(vlm, "TIMEOUT_S", 0.2)
    assert "timed out" in refused()
    with pytest.raises(ValueError, match="url\n.*should match pattern"):
        label(frames, server, path, url="localhost:8000")
    assert "--by is about frames; leave out" in refused(unit="episode")
    assert "need --by" in refused(by=None)
    monkeypatch.setitem(sys.modules, "openai", None)  # as if it were not installed
    assert 'pip install ".[vlm]"' in refused()


def test_an_answer_that_a_person_gives_meanwhile_stays(frames, server, tmp_path):
    path = tmp_path / "labels.csv"
    command = eval_epic.Label(dataset=frames, by="tiny-vlm", url=server.url, labels=str(path))
    session = command.session()
    person = eval_epic.Label(dataset=frames, labels=str(path)).session()
    for _ in range(2):
        person.answer(index := person.todo()[0], False)
        session.answer(index, True)
    assert [label for label, by in read_plain(path)] == ["0", "0"]


def read_plain(path):
    with open(path, newline="") as file:
        return [(row["label"], row.get("by", "")) for row in csv.DictReader(file)]


def test_check_counts_agreement_with_a_person_or_the_judge(frames, server, tmp_path, capsys):
    path, wrong = tmp_path / "labels.csv", [3, 5, 40]
    for k in wrong:
        server.verdicts[k] = not server.verdicts[k]
    server.faults = {7: ["unsure"]}
    label(frames, server, path, check=48)
    said = capsys.readouterr().out
    assert "against the judge, 48 frames" in said and not path.exists()
    rows = [
        re.findall(r"\d+", line) for line in said.splitlines() if re.match(r" +(not )?good:", line)
    ]
    assert rows == [["23", "1", "0"], ["2", "21", "1"]]
    # Wilson's interval, by hand
    n, p, z = 47, 44 / 47, 1.959964
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = 100 * (middle - half), 100 * (middle + half)
    assert f"agreement: 94 % (95 % interval {low:.0f} % to {high:.0f} %) of the 47 answers" in said
    sheet = re.search(r"wrote (\S+) \(", said)[1]
    colours = np.asarray(Image.open(sheet)).reshape(-1, 3)
    assert (colours == (0, 150, 0)).all(1).any() and (colours == (210, 0, 0)).all(1).any()
    # against the person's labels and none of another model's
    rows = ["dataset,unit,index,task,label,by"]
    rows += [f"cartpole,frame,{k},cartpole,{int(k >= 24)}," for k in range(20, 30)]
    rows += [f"cartpole,frame,{k},cartpole,1,other" for k in range(10)]
    path.write_text("\n".join(rows) + "\n")
    before = path.read_bytes()
    label(frames, server, path, check=100)
    said = capsys.readouterr().out
    assert "a person's labels" in said and "10 frames" in said and "agreement: 100 %" in said
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("errors", [0.05, 0.15])
def test_all_commands_take_the_labels_and_fit_says_whose_they_are(
    frames, server, tmp_path, capsys, errors
):
    path, rng = tmp_path / "labels.csv", np.random.default_rng(0)
    server.verdicts = [bool(v ^ (rng.random() < errors)) for v in server.verdicts]
    path.write_text(
        "dataset,unit,index,task,label\ncartpole,frame,0,cartpole,0\ncartpole,frame,47,cartpole,1\n"
    )
    label(frames, server, path)
    capsys.readouterr()
    model = eval_epic.HeadModel(clip_model="tiny_clip")
    out = tmp_path / "head.safetensors"
    eval_epic.Fit(dataset=(frames,), labels=str(path), out=out, reward=model)()
    said = capsys.readouterr().out
    assert "a person: 2" in said and "tiny-vlm: 46" in said and "all have the same weight" in said
    assert float(re.search(r"(\d\.\d+) \(.*the head", said)[1]) > 0.6
    rewards = eval_epic.Rewards(clip_model=("tiny_clip",))
    eval_epic.Epic(dataset=frames, labels=str(path), reward=rewards)()
    assert "tiny_clip" in capsys.readouterr().out
    rewards = PromptRewards(clip_model=("tiny_clip",), reward_alpha=(0.0,))
    eval_epic.Prompts(dataset=frames, labels=str(path), reward=rewards, out=tmp_path / "prompts")()
    good = sum(server.verdicts[1:47]) + 1
    assert f"cartpole: 48 states, {good} of them good" in capsys.readouterr().out
    eval_epic.Success(dataset=frames, labels=str(path))()  # each state is an episode
    assert f"({good} of 48 episodes)" in capsys.readouterr().out
