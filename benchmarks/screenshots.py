"""Pictures of TensorBoard's first page and of a run's index.html, for docs/. Wants Chromium (make
browser).

    python benchmarks/screenshots.py runs/RUN --out docs
"""

import io
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tyro
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service


def main(run: tyro.conf.Positional[Path], out: Path = Path("docs"), wait: float = 8.0) -> None:
    """Write tensorboard.png and index_page.png.

    Args:
        run: folder of the run
        out: folder for the pictures
        wait: seconds until TensorBoard has drawn everything
    """
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run), "--port", "0"]
    board = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = next(filter(None, (re.search(r"http://\S+", line) for line in board.stderr)))[0]
        pages = {
            "tensorboard.png": (f"{address}#custom_scalars", wait),
            "index_page.png": ((run / "index.html").resolve().as_uri(), 1.0),
        }
        options = webdriver.ChromeOptions()
        for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
            options.add_argument(f"--{flag}")
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
        browser = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        for name, (page, seconds) in pages.items():
            browser.set_window_size(1280, 1400)
            browser.get(page)
            time.sleep(seconds)
            whole = browser.execute_script("return document.documentElement.scrollHeight")
            browser.set_window_size(1280, max(1400, whole))
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
            picture.quantize().save(out / name, optimize=True)  # a tenth of the bytes
            print(f"wrote {out / name}")
        browser.quit()
    finally:
        board.kill()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
