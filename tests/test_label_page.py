"""The labelling page: its file of answers, and the page itself in a real browser."""

import csv
import dataclasses
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
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import eval_epic
import judges
import label_page
from clip_reward import UsageError

ROOT = Path(label_page.__file__).parent
PATIENCE = 180  # s: a busy machine needs a minute to start a browser
COLUMNS = eval_epic.LABEL_COLUMNS


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """24 CartPole states, as `collect` makes them: [0, 12) fail the judge's rule, [12, 24) pass."""
    folder = tmp_path_factory.mktemp("data") / "cartpole"
    kind = eval_epic.Collect(source="uniform", out=folder, states=24, render_size=48)
    eval_epic.collect(kind)
    good = np.linspace(-0.2, 0.2, 12)
    bad = np.linspace(0.5, 3, 12)
    return rewritten(folder, {"source": "uniform"}, angles=np.concatenate([bad, good]))


@pytest.fixture(scope="module")
def episodes(dataset, tmp_path_factory):
    """The same as four episodes of six steps, stored in reverse order of time."""
    folder = tmp_path_factory.mktemp("data") / "episodes"
    shutil.copytree(dataset, folder)
    step, episode = np.tile(np.arange(6)[::-1], 4), np.repeat(np.arange(4), 6)
    return rewritten(folder, {"source": "run"}, step=step, episode=episode)


def rewritten(folder, arguments, angles=None, **columns):
    """The dataset with other states and columns, under the id that belongs to them."""
    meta, old = eval_epic.read_meta(folder), eval_epic.read_states(folder)
    columns = old | columns
    if angles is not None:
        columns["states"] = np.zeros((len(angles), 4))
        columns["states"][:, 2] = angles
        for index, angle in enumerate(angles):  # each picture can be told from the others
            color = (10 * index, 255 if abs(angle) < 0.21 else 0, 128)
            Image.new("RGB", (48, 48), color).save(folder / "frames" / f"{index:06d}.png")
    meta["arguments"] |= arguments
    np.savez_compressed(folder / "states.npz", **columns)
    meta["id"] = eval_epic.content_id(columns, meta["arguments"])
    (folder / "dataset.json").write_text(json.dumps(meta))
    return folder


def make_session(folder, path, unit="frame", **options):
    dataset = eval_epic.load_dataset(folder)
    return label_page.Session(dataset, judges.TASKS["cartpole"], unit, path, **options)


def read(path):
    """{index: label} of a file of labels, read with nothing but the csv module."""
    with open(path, newline="") as file:
        return {int(row["index"]): row["label"] == "1" for row in csv.DictReader(file)}


# ------------------------------------------------------------------------------ the file


def test_every_answer_is_in_the_file_and_the_next_session_goes_on(dataset, tmp_path):
    path = tmp_path / "labels.csv"
    session, given = make_session(dataset, path), {}
    for k in range(5):
        index = session.current()
        assert index not in given
        given[index] = k % 2 == 0
        session.answer(index, given[index])
        assert read(path) == given
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    frames, _ = eval_epic.read_labels(path, session.dataset, "cartpole")  # what epic will see
    assert {k: bool(frames[k]) for k in np.flatnonzero(np.isfinite(frames))} == given

    again = make_session(dataset, path)
    assert again.answers == given and again.current() == session.current()
    last = list(given)[-1]
    again.undo()  # reaches back beyond the start of this session
    assert again.current() == last and read(path) == {k: given[k] for k in list(given)[:-1]}
    assert list(tmp_path.iterdir()) == [path]  # no temporary files


def test_skipped_units_come_last_and_can_be_taken_back(dataset, tmp_path):
    session = make_session(dataset, tmp_path / "labels.csv", count=3, order="dataset")
    session.skip(0)
    assert session.current() == 1
    session.undo()
    assert session.current() == 0
    session.skip(0)
    session.answer(1, True)
    session.answer(2, True)
    assert session.current() == 0
    session.answer(0, False)
    assert session.current() is None and read(session.path) == {1: True, 2: True, 0: False}
    session.answer(None, True)
    session.skip(None)
    for expected in ({1: True, 2: True}, {1: True}, {}):
        session.undo()
        assert read(session.path) == expected


def test_an_answer_to_a_picture_that_is_gone_is_dropped(dataset, tmp_path):
    session = make_session(dataset, tmp_path / "labels.csv", order="dataset")
    session.answer(0, True)
    session.answer(0, False)  # the second press of a double
    session.answer(7, False)  # another window
    session.skip(7)
    assert read(session.path) == {0: True} and session.current() == 1


def test_count_means_the_same_random_units_every_time(dataset, tmp_path):
    one, two = (make_session(dataset, tmp_path / "x.csv", count=6).order for _ in range(2))
    assert one == two and len(set(one)) == 6 and one != sorted(one)


def test_foreign_rows_and_other_writers_are_kept(dataset, tmp_path):
    path, identity = tmp_path / "labels.csv", eval_epic.read_meta(dataset)["id"]
    foreign = ["other,frame,0,cartpole,1,me", f"{identity},frame,3,kneeling,0,me"]
    path.write_text("\n".join([",".join([*COLUMNS, "who"]), *foreign, ""]))
    session = make_session(dataset, path, order="dataset")
    assert not session.answers
    session.answer(0, True)
    # somebody else answers 1 and 2 meanwhile
    with open(path, "a") as file:
        file.write(f"{identity},frame,1,cartpole,0,you\n{identity},frame,2,cartpole,1,you\n")
    session.answer(1, True)  # has an answer already; it stays
    session.answer(3, True)
    session.undo()
    lines = path.read_text().splitlines()[1:]
    assert lines == [
        *foreign,
        f"{identity},frame,0,cartpole,1,",
        f"{identity},frame,1,cartpole,0,you",
        f"{identity},frame,2,cartpole,1,you",
    ]
    spoiled = path.read_bytes() + f"{identity},frame,3,cartpole,perhaps,x\n".encode()
    path.write_bytes(spoiled)
    with pytest.raises(UsageError, match="line 7"):
        session.answer(3, True)
    assert path.read_bytes() == spoiled


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failed_save_changes_nothing(dataset, tmp_path, monkeypatch, broken):
    session = make_session(dataset, tmp_path / "labels.csv", order="dataset")
    session.answer(0, True)
    before = session.path.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(UsageError, match="not saved.*No space left"):
            session.answer(1, True)
    assert session.path.read_bytes() == before and list(tmp_path.iterdir()) == [session.path]
    assert session.current() == 1
    session.answer(1, True)
    assert read(session.path) == {0: True, 1: True}


def test_agreement_with_the_judge(dataset, episodes, tmp_path):
    session = make_session(dataset, tmp_path / "labels.csv", order="dataset")
    for index in range(24):
        session.answer(index, index in (0, 1, 2, 13, 14))  # the judge says: index >= 12
    table = {(True, False): 3, (True, True): 2, (False, True): 10, (False, False): 9}
    assert session.agreement() == table
    clips = make_session(episodes, tmp_path / "clips.csv", "episode")
    assert clips.verdicts([3, 0, 1, 2]) == [True, False, False, True]


def test_a_clip_shows_all_pictures_in_the_order_of_time(episodes, tmp_path):
    session = make_session(episodes, tmp_path / "labels.csv", "episode")
    with Image.open(io.BytesIO(session.image(2, fps=10))) as clip:
        assert clip.format == "WEBP" and clip.n_frames == 6 and clip.info["loop"] == 0
        for k in range(6):
            clip.seek(k)
            red = 10 * (12 + 5 - k)  # episode 2 is rows 12 to 17, the last of which is step 0
            assert np.abs(np.asarray(clip.convert("RGB"))[24, 24].astype(int)[0] - red) < 8
            assert clip.info["duration"] == 100
    with Image.open(io.BytesIO(make_session(episodes, tmp_path / "f.csv").image(3))) as frame:
        assert frame.format == "PNG"
        assert (np.asarray(frame) == session.dataset.frame(3)).all()


def test_a_damaged_picture_is_said_to_be_damaged(dataset, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(dataset, folder)
    picture = folder / "frames" / "000000.png"
    picture.write_bytes(picture.read_bytes()[:60])
    session = make_session(folder, tmp_path / "labels.csv", order="dataset")
    page = label_page.picture_html(session, session.image, "/picture")
    assert "Damaged: skip it" in page and str(picture) in page and 'data-index="0"' in page
    session.skip(0)
    page = label_page.picture_html(session, session.image, "/picture")
    assert 'class=now src="/picture/1"' in page and 'class=next src="/picture/2"' in page


# ------------------------------------------------------------------------------ bad input


def test_what_cannot_work_is_said_before_anything_is_written(dataset, episodes, tmp_path):
    label = label_page.Label(dataset, labels=tmp_path / "labels.csv")
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("a,b\n1,2\n")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    wrong = tmp_path / "wrong.csv"
    identity = eval_epic.read_meta(dataset)["id"]
    wrong.write_text(f"{','.join(COLUMNS)}\n{identity},frame,99,cartpole,1\n")
    gap = tmp_path / "gap"
    shutil.copytree(dataset, gap)
    (gap / "frames" / "000007.png").unlink()
    before = {path: path.read_bytes() for path in (foreign, binary, wrong)}
    for change, words in {
        ("dataset", tmp_path): "not a dataset",
        ("dataset", gap): "000007.png is missing",
        ("task", "kneeling"): "--task kneeling",
        ("unit", "episode"): "single states and no episodes",
        ("labels", foreign): "not labels",
        ("labels", binary): "not a CSV file",
        ("labels", wrong): "has no frame 99",
        ("labels", tmp_path / "nowhere" / "labels.csv"): "no folder",
        ("labels", tmp_path): "Is a directory",
        ("port", 70000): "--port 70000",
        ("count", 0): "--count 0",
        ("fps", 0.0): "--fps 0",
    }.items():
        with pytest.raises(UsageError) as error:
            label_page.check_label(dataclasses.replace(label, **dict([change])))
        assert words in str(error.value) and "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in before} == before
    assert not (tmp_path / "labels.csv").exists()


def test_a_port_that_is_taken():
    with label_page.listen(None) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port}: Address already in use"):
            label_page.listen(port)


def test_without_gradio_it_says_what_to_install(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(label_page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("pip install .[label]")):
        label_page.label(label_page.Label(dataset))


def test_command_line(dataset, tmp_path):
    command = [sys.executable, ROOT / "label_page.py"]
    cases = {
        (tmp_path / "nothing",): "error: .*not a dataset",
        (dataset, "--share"): "(?s).*[Uu]nrecognized.*--share",
    }
    for arguments, words in cases.items():
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600)
        assert done.returncode == 2 and re.match(words, done.stderr), done.stderr


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


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium that can reach nothing but this machine."""
    try:
        import gradio  # noqa: F401
        from selenium import webdriver
    except ImportError as error:
        pytest.fail(f"{error.name} is missing: pip install -r requirements.txt")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.fail(
            "the labelling page is tested in a browser, and there is none; as root: "
            "apt-get update && apt-get install -y chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",  # Chromium's own sandbox does not work for root
        "--disable-dev-shm-usage",  # containers have little of it
        "--window-size=1280,900",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
        chrome.set_page_load_timeout(PATIENCE)
        yield chrome
        chrome.quit()


class Server:
    """The command, started as a user would, with everything set that could make it talk."""

    def __init__(self, tmp_path, *arguments):
        self.log = tmp_path / "network.log"
        wish = {"GRADIO_SHARE": "True", "GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_DEBUG": "1"}
        command = [sys.executable, "-c", WATCH, self.log, ROOT / "label_page.py", *arguments]
        self.errors = open(tmp_path / "stderr", "w+")
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=os.environ | wish | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        deadline, self.said, self.url = time.monotonic() + PATIENCE, "", None
        while self.url is None and time.monotonic() < deadline:
            if not select.select([self.process.stdout], [], [], 1)[0]:
                continue
            line = self.process.stdout.readline()
            self.said += line
            found = re.search(r"open (http://127\.0\.0\.1:(\d+)) ", line)
            if found:
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
        "if (!shot) return null;"
        "const image = shot.querySelector('img.now');"
        "return !image || image.naturalWidth ? Number(shot.dataset.index) : null;"
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
    """Press a key as soon as the page takes it and wait for another picture; its number before."""
    from selenium.webdriver.common.action_chains import ActionChains

    before = shown(browser)
    wait(lambda: not browser.execute_script("return isWaiting()"))
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


def test_ten_frames_are_labelled_by_key_in_a_browser(browser, dataset, tmp_path):
    path = tmp_path / "labels.csv"
    arguments = (dataset, "--labels", path, "--count", "10")
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
            good = index >= 12
            press(browser, "y" if good == (k != 3) else "n")
            given[index] = good == (k != 3)
            assert read(path) == given
        text = browser.find_element("tag name", "body").text
        assert "4 of 10" in text and "75 %" in text and "3 of 4" in text
        skipped = press(browser, "s")
        assert read(path) == given
        index = press(browser, "y")
        press(browser, "u")
        assert shown(browser) == index and read(path) == given
        # two presses before anything could be drawn: one answer
        wait(lambda: not browser.execute_script("return isWaiting()"))
        browser.execute_script(
            "for (let k = 0; k < 2; k++)"
            "  document.dispatchEvent(new KeyboardEvent('keydown', {key: 'n', bubbles: true}));"
        )
        given[index] = False
        wait(lambda: shown(browser) not in (None, index))
        assert read(path) == given
        server.process.send_signal(signal.SIGKILL)
    with Server(tmp_path, *arguments) as server:
        assert "5 of 10 are done" in server.said
        open_page(browser, server)
        while shown(browser) != -1:
            index = shown(browser)
            assert index not in given
            given[index] = len(given) % 2 == 0
            press(browser, "y" if given[index] else "n")
            assert read(path) == given
        assert len(given) == 10 and skipped in given
        assert "All 10 are labelled" in browser.find_element("tag name", "body").text
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert f"10 of 10 labelled, in {path}" in server.process.stdout.read()
    assert requested_hosts(browser) == {"127.0.0.1"}
    asked = {line.split()[1] for line in server.log.read_text().splitlines()}
    assert "localhost" in asked and asked <= {"127.0.0.1", "localhost"}
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    # the first server was killed while the page was open
    assert not [e["message"] for e in severe if "ERR_CONNECTION" not in e["message"]]


def test_an_episode_is_a_clip_in_the_browser(browser, episodes, tmp_path):
    path = tmp_path / "labels.csv"
    with Server(tmp_path, episodes, "--unit", "episode", "--labels", path) as server:
        open_page(browser, server)
        assert browser.execute_script(
            "return fetch(document.querySelector('#picture img.now').src)"
            ".then((answer) => answer.headers.get('content-type'))"
        ) == ("image/webp")
        index = press(browser, "y")
        assert read(path) == {index: True}
        row = next(csv.DictReader(open(path, newline="")))
        assert row["unit"] == "episode" and row["dataset"] == eval_epic.read_meta(episodes)["id"]
