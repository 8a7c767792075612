"""The labelling page: its file of answers, and the page itself in a real browser."""

import base64
import csv
import http.client
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
from conftest import PATIENCE
from PIL import Image

import dqn_clip_classic as dqn
import eval_epic
from clip_reward import RunError, UsageError
from environments import judges
from evaluation import datasets, label_page

COLUMNS = datasets.LABEL_COLUMNS


def save(path, source, **columns):
    """24 CartPole states: [0, 12) fail the judge's rule, [12, 24) pass."""
    states = np.zeros((24, 4))
    states[:, 2] = np.concatenate([np.linspace(0.5, 3, 12), np.linspace(-0.2, 0.2, 12)])
    args = dqn.Args(render_size=48)
    datasets.save_dataset(datasets.Dataset(args, {"source": source}, states, **columns), path)
    return path


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """The states, as `collect` saves them."""
    return save(tmp_path_factory.mktemp("data") / "cartpole.npz", "uniform")


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """The same as four episodes of six steps, stored in reverse order of time."""
    columns = {"step": np.tile(np.arange(6)[::-1], 4), "episode": np.repeat(np.arange(4), 6)}
    return save(tmp_path_factory.mktemp("data") / "episodes.npz", "run", **columns)


def make_session(dataset, path, unit="frame", **options):
    """A session; with order=True in that of the dataset."""
    ordered = options.pop("order", False)
    dataset, task = datasets.load_dataset(dataset), judges.TASKS["cartpole"]
    session = label_page.Session(dataset, task, unit, path, **options)
    session.order = list(range(len(session.order))) if ordered else session.order
    return session


def current(session):
    return next(iter(session.todo()), None)


def render(states):
    """[B, 48, 48, 3]: each picture can be told from the others."""
    return np.stack([np.full((48, 48, 3), 40 * (state[2] + 1), np.uint8) for state in states])


def read(path):
    """{index: label} of a file of labels, read with nothing but the csv module."""
    with open(path, newline="") as file:
        return {int(row["index"]): row["label"] == "1" for row in csv.DictReader(file)}


# ------------------------------------------------------------------------------ the file


def test_every_answer_is_in_the_file_and_the_next_session_goes_on(frames, tmp_path):
    path = tmp_path / "labels.csv"
    session, given = make_session(frames, path), {}
    for k in range(5):
        index = current(session)
        assert index not in given
        given[index] = k % 2 == 0
        session.answer(index, given[index])
        assert read(path) == given
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    # what epic will see
    assert datasets.read_labels(path, session.dataset, "cartpole")["frame"] == given
    again = make_session(frames, path)
    assert again.answers == given and current(again) == current(session)
    last = list(given)[-1]
    again.undo()  # reaches back beyond the start of this session
    assert current(again) == last and read(path) == {k: given[k] for k in list(given)[:-1]}
    assert list(tmp_path.iterdir()) == [path]  # no temporary files


def test_the_page_goes_on_with_a_file_that_a_spreadsheet_saved(frames, tmp_path):
    """Rows on others and notes are kept, in the page's own form."""
    path = tmp_path / "labels.csv"
    rows = ["Dataset;unit;index;task;label;note", "cartpole;frame;0;cartpole;1;Größe, 5 €"]
    path.write_bytes(
        "\r\n".join([*rows, "other;frame;9;kneeling;0;", "", ";;;;;"]).encode("cp1252")
    )
    session = make_session(frames, path)
    assert session.answers == {0: True}
    index = current(session)
    session.answer(index, False)
    with open(path, newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    assert columns == [*COLUMNS, "note"]
    assert rows[0] == ["cartpole", "frame", "0", "cartpole", "1", "Größe, 5 €"]
    assert rows[1] == ["other", "frame", "9", "kneeling", "0", ""]
    assert rows[2:] == [["cartpole", "frame", str(index), "cartpole", "0", ""]]


def test_skipped_units_come_last_and_can_be_taken_back(frames, tmp_path):
    session = make_session(frames, tmp_path / "labels.csv", count=3, order=True)
    session.answer(0, None)
    assert current(session) == 1
    session.undo()
    assert current(session) == 0
    session.answer(0, None)
    session.answer(1, True)
    session.answer(2, True)
    assert current(session) == 0
    session.answer(0, False)
    assert current(session) is None and read(session.path) == {1: True, 2: True, 0: False}
    session.answer(0, True)  # all are answered
    for expected in ({1: True, 2: True}, {1: True}, {}):
        session.undo()
        assert read(session.path) == expected


def test_an_answer_to_a_picture_that_is_gone_is_dropped(frames, tmp_path):
    session = make_session(frames, tmp_path / "labels.csv", order=True)
    session.answer(0, True)
    session.answer(0, False)  # the second press of a double
    session.answer(7, False)  # another window
    session.answer(7, None)
    assert read(session.path) == {0: True} and current(session) == 1


def test_count_means_the_same_random_units_every_time(frames, tmp_path):
    one, two = (make_session(frames, tmp_path / "x.csv", count=6).order for _ in range(2))
    assert one == two and len(set(one)) == 6 and one != sorted(one)


def test_foreign_rows_and_other_writers_are_kept(frames, tmp_path):
    path = tmp_path / "labels.csv"
    foreign = ["other,frame,0,cartpole,1,me", "cartpole,frame,3,kneeling,0,me"]
    path.write_text("\n".join([",".join([*COLUMNS, "who"]), *foreign, ""]))
    session = make_session(frames, path, order=True)
    assert not session.answers
    session.answer(0, True)
    with open(path, "a") as file:  # somebody else answers 2 meanwhile
        file.write("cartpole,frame,2,cartpole,1,you\n")
    session.answer(1, True)
    session.undo()
    lines = path.read_text().splitlines()[1:]
    assert lines == [*foreign, "cartpole,frame,0,cartpole,1,", "cartpole,frame,2,cartpole,1,you"]
    path.write_bytes(spoiled := b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="not labels"):
        session.answer(1, True)
    assert path.read_bytes() == spoiled and current(session) == 1


def test_two_writers_lose_nothing_and_the_first_answer_stays(frames, tmp_path):
    data = datasets.load_dataset(frames)
    data.states = np.tile(data.states, (5, 1))
    path, task = tmp_path / "labels.csv", judges.TASKS["cartpole"]
    halves = [[*range(start, 120, 2)] for start in (0, 1)]
    sessions = [label_page.Session(data, task, "frame", path, order=half) for half in halves]

    def answer_all(session):
        for index in session.todo():
            session.answer(index, index % 3 == 0)

    with ThreadPoolExecutor() as pool:
        list(pool.map(answer_all, sessions))
    assert read(path) == {index: index % 3 == 0 for index in range(120)}

    path = tmp_path / "again.csv"
    person, model = (label_page.Session(data, task, "frame", path, order=[4, 5]) for _ in "12")
    person.answer(4, True)
    model.by = "a model"
    model.answer(4, False)
    model.answer(5, False)
    assert read(path) == {4: True, 5: False} and model.answers == {4: True, 5: False}
    person.answer(5, True)  # a person's replaces a model's
    assert read(path) == {4: True, 5: True}


def test_a_file_that_is_removed_meanwhile_is_written_again(frames, tmp_path):
    session = make_session(frames, tmp_path / "folder" / "labels.csv", order=True)
    for index in range(3):
        session.answer(index, index == 1)
    shutil.rmtree(session.path.parent)
    session.answer(3, True)
    assert read(session.path) == {0: False, 1: True, 2: False, 3: True}
    session.path.unlink()
    session.undo()
    assert read(session.path) == {0: False, 1: True, 2: False}


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failed_save_changes_nothing(frames, tmp_path, monkeypatch, broken):
    session = make_session(frames, tmp_path / "labels.csv", order=True)
    session.answer(0, True)
    before = session.path.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(RunError, match="No space left"):
            session.answer(1, True)
    assert session.path.read_bytes() == before
    assert current(session) == 1
    session.answer(1, True)
    assert read(session.path) == {0: True, 1: True}


def test_a_clip_shows_all_pictures_in_the_order_of_time(frames, episodes, tmp_path):
    session = make_session(episodes, tmp_path / "labels.csv", "episode")

    def drawn(session, index):
        data = session.data_url(index, render).partition("base64,")[2]
        return Image.open(io.BytesIO(base64.b64decode(data)))

    with drawn(session, 1) as clip:
        assert clip.format == "WEBP" and clip.n_frames == 6 and clip.info["loop"] == 0
        for k in range(6):
            clip.seek(k)
            # episode 1 is rows 6 to 11, the last of which is step 0
            expected = render(session.dataset.states[[6 + 5 - k]])[0, 0, 0, 0]
            shown = np.asarray(clip.convert("RGB"))[24, 24].astype(int)[0]
            assert abs(shown - expected) < 4 and clip.info["duration"] == 100
    session = make_session(frames, tmp_path / "f.csv")
    with drawn(session, 3) as frame:
        assert frame.format == "PNG"
        np.testing.assert_array_equal(np.asarray(frame), render(session.dataset.states[[3]])[0])


# ------------------------------------------------------------------------------ bad input


def test_what_cannot_work_is_said_before_anything_is_written(frames, tmp_path):
    mine = shutil.copy(frames, tmp_path / "cartpole.npz")
    files = {"foreign": b"a,b\n1,2\n", "binary": b"\xff\xfe\x00"}
    files["wrong"] = f"{','.join(COLUMNS)}\ncartpole,frame,99,cartpole,1\n".encode()
    for name, content in files.items():
        (tmp_path / f"{name}.csv").write_bytes(content)
    (tmp_path / "folder.csv").mkdir()

    def refused(**change):
        if "labels" in change:
            change["labels"] = str(tmp_path / f"{change['labels']}.csv")
        with pytest.raises((UsageError, OSError)) as error:
            eval_epic.Label(**{"dataset": mine} | change)()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "damaged or not what" in refused(dataset=tmp_path / "wrong.csv")
    assert "--judge kneeling" in refused(judge="kneeling")
    assert "single states and no episodes" in refused(unit="episode")
    assert "not labels" in refused(labels="foreign")
    assert "not labels" in refused(labels="binary")
    assert "must be a frame or episode of" in refused(labels="wrong")
    assert "Is a directory" in refused(labels="folder")
    assert {name: (tmp_path / f"{name}.csv").read_bytes() for name in files} == files
    assert not (tmp_path / "cartpole").exists()


# ------------------------------------------------------------------------------ other visitors


def test_only_the_page_itself_can_read_and_press(frames, tmp_path):
    """Other sites in the same browser, and names that they point at this machine, get nothing."""
    session = make_session(frames, tmp_path / "labels.csv", count=5)
    scorer = SimpleNamespace(render=lambda states, size: render(states))
    with (
        ThreadPoolExecutor(1) as drawing,
        label_page.PageServer(session, drawing, scorer) as server,
    ):
        with pytest.raises(UsageError, match=f"--port {server.server_port}: .* in use"):
            label_page.PageServer(session, drawing, scorer, server.server_port)
        Thread(target=server.serve_forever, daemon=True).start()
        here, path = f"127.0.0.1:{server.server_port}", urlsplit(server.url).path

        def ask(method, path=path, body=None, **headers):
            connection = http.client.HTTPConnection(here, timeout=PATIENCE)
            connection.request(method, path, body, {"Host": here} | headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer.status, text

        def press(button="yes", index=None, **headers):
            index = current(session) if index is None else index
            body = json.dumps({"button": button, "index": index})
            return ask("POST", body=body, **{"Origin": f"http://{here}"} | headers)

        local = f"localhost:{server.server_port}"
        assert ask("GET")[0] == ask("GET", Host=local)[0] == 200
        refused = [ask("GET", each) for each in ("/", path[:-1], path + "/", "/%00", "/../" + path)]
        refused += [ask("GET", Host=host) for host in ("evil.example", f"127.0.0.1.evil:{here}")]
        origins = "http://evil.example", "null", "", "http://127.0.0.1:1", f"https://{here}"
        refused += [press(Origin=origin) for origin in origins]
        refused += [press(Host="evil.example", Origin="http://evil.example")]
        refused += [ask("POST", "/", "{}", Origin=f"http://{here}")]
        refused += [ask("POST", body="x" * 30_000, Origin=f"http://{here}")]  # an upload
        assert [status for status, _ in refused] == [403] * len(refused)
        assert not any(path in text or "<img" in text for _, text in refused)
        nowhere = [press(index=index) for index in (99, -1, True, "0", 0.0, [], {})]
        assert [status for status, _ in nowhere] == [409] * len(nowhere)
        odd = "", "[]", "null", "{", "[" * 900, '{"button": "yes"}', '{"button": [], "index": 0}'
        answers = [ask("POST", body=body, Origin=f"http://{here}")[0] for body in odd]
        assert answers == [403] + [400] * (len(odd) - 1) and press("delete")[0] == 400
        assert ask("PUT")[0] == ask("DELETE")[0] == ask("OPTIONS")[0] == 501
        assert not session.path.exists() and not session.answers
        first = current(session)
        status, text = press()
        assert status == 200 and json.loads(text)["progress"] == "1 of 5"
        assert read(session.path) == {first: True}
        server.shutdown()


# ------------------------------------------------------------------------------ in a browser

# Everything that the server's Python asks the network for goes into a file
WATCH = """
import runpy, socket, sys
log = open(sys.argv.pop(1), "a", buffering=1)
def hook(event, args):
    if event == "socket.getaddrinfo":
        print(event, args[0], file=log)
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        print(event, args[1][0], file=log)
sys.addaudithook(hook)
socket.getaddrinfo("localhost", 0)  # to see that the watch is awake
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Server:
    """The command, started as a user would."""

    def __init__(self, tmp_path, *arguments):
        self.log = tmp_path / "network.log"
        command = [sys.executable, "-c", WATCH, self.log, eval_epic.__file__, "label", *arguments]
        self.errors = open(tmp_path / "stderr", "w+")
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        deadline, self.said, self.url = time.monotonic() + PATIENCE, "", None
        while self.url is None and time.monotonic() < deadline:
            if not select.select([self.process.stdout], [], [], 1)[0]:
                continue
            line = self.process.stdout.readline()
            self.said += line
            if found := re.search(r"open (http://127\.0\.0\.1:(\d+)/\S{40,}) ", line):
                self.url, self.port = found[1], int(found[2])
            if not line and self.process.poll() is not None:
                break
        if self.url is None:
            self.process.kill()
            self.errors.seek(0)
            pytest.fail(f"no page: {self.said} {self.errors.read()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def shown(browser):
    """Number of the unit whose picture can be seen; -1: all done; None: nothing yet."""
    return browser.execute_script(
        "const shot = document.querySelector('#picture [data-index]');"
        "return shot && (shot.tagName != 'IMG' || shot.naturalWidth)"
        "  ? Number(shot.dataset.index) : null;"
    )


def wait(question):
    """The first true answer."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        answer = question()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError("the page did not do it")


def open_page(browser, server):
    browser.get(server.url)
    wait(lambda: shown(browser) is not None)
    time.sleep(0.2)


def press(browser, key):
    """Press a key and wait for another picture; the number before."""
    from selenium.webdriver.common.action_chains import ActionChains

    before = shown(browser)
    ActionChains(browser).send_keys(key).perform()
    wait(lambda: shown(browser) not in (None, before))
    return before


def requested_hosts(browser):
    """Hosts that the browser asked for anything since the last look."""
    hosts = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if url.startswith("http"):
                hosts.add(re.match(r"https?://([^/:]+)", url)[1])
    return hosts


def test_ten_frames_are_labelled_by_key_in_a_browser(browser, frames, tmp_path):
    path = tmp_path / "labels.csv"
    arguments = (frames, "--labels", path, "--count", "10")
    given = {}
    with Server(tmp_path, *arguments) as server:
        with socket.socket() as elsewhere:  # would answer if it listened on all addresses
            assert elsewhere.connect_ex(("127.0.0.2", server.port)) != 0
        requested_hosts(browser)
        open_page(browser, server)
        text = browser.find_element("tag name", "body").text
        assert judges.TASKS["cartpole"].criterion in text and "0 of 10" in text
        for k in range(4):  # as the judge says, but for one
            index = shown(browser)
            given[index] = (index >= 12) == (k != 3)
            press(browser, "y" if given[index] else "n")
            assert read(path) == given
        text = browser.find_element("tag name", "body").text
        assert "4 of 10" in text and "agree" not in text and "%" not in text
        skipped = press(browser, "s")
        assert read(path) == given
        index = press(browser, "y")
        press(browser, "u")
        assert shown(browser) == index and read(path) == given
        # two presses before anything could be drawn: one answer
        browser.execute_script(
            "for (let k = 0; k < 2; k++)"
            "  document.dispatchEvent(new KeyboardEvent('keydown', {key: 'n', bubbles: true}));"
        )
        given[index] = False
        wait(lambda: shown(browser) not in (None, index))
        assert read(path) == given
        log = browser.get_log("browser")
        server.process.send_signal(signal.SIGKILL)
    with Server(tmp_path, *arguments) as server:
        assert "5 of 10 are done" in server.said
        open_page(browser, server)
        browser.get_log("browser")  # complaints that the first server was gone
        while shown(browser) != -1:
            index = shown(browser)
            assert index not in given
            given[index] = len(given) % 2 == 0
            press(browser, "y" if given[index] else "n")
            assert read(path) == given
        assert len(given) == 10 and skipped in given
        text = browser.find_element("tag name", "body").text
        assert "All 10 are labelled" in text and "agree" not in text
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        said = server.process.stdout.read()
        assert f"10 of 10 are labelled, in {path}" in said
        assert f"python eval_epic.py fit --dataset {frames}" in said
    assert requested_hosts(browser) == {"127.0.0.1"}
    asked = {line.split()[1] for line in server.log.read_text().splitlines()}
    assert asked == {"localhost"}
    log += browser.get_log("browser")
    assert not [entry["message"] for entry in log if entry["level"] == "SEVERE"]


@pytest.mark.slow
def test_an_episode_is_a_clip_in_the_browser(browser, episodes, tmp_path):
    path = tmp_path / "labels.csv"
    with Server(tmp_path, episodes, "--unit", "episode", "--labels", path) as server:
        open_page(browser, server)
        source = "return document.querySelector('#picture img').src.slice(0, 15)"
        wait(lambda: browser.execute_script(source) == "data:image/webp")
        index = press(browser, "y")
        assert read(path) == {index: True}
        row = next(csv.DictReader(open(path, newline="")))
        assert row["unit"] == "episode" and row["dataset"] == "episodes"
        path.write_bytes(spoiled := b"\xff\xfe\x00\x80")
        index = shown(browser)
        browser.find_element("id", "yes").click()
        wait(lambda: "not labels" in browser.find_element("tag name", "body").text)
        assert shown(browser) == index and path.read_bytes() == spoiled
