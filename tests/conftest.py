"""With `pytest -n 2` the tests of a file stay together, for what they share. A test that starts a
Ray cluster names it in RAY_ADDRESS, or its processes may find another test's."""

import shutil

import pytest

PATIENCE = 180  # s: a busy machine needs a minute to start a browser


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.module.__name__ != "test_trust":  # minutes, and shares nothing
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium that can reach nothing but this machine."""
    try:
        from selenium import webdriver
    except ImportError as error:
        pytest.fail(f"{error.name} is missing: pip install -r requirements-dev.txt")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.fail(
            "pages are tested in a browser, and there is none; as root: "
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


@pytest.fixture(params=["egl", "warp"])
def renderer(request, monkeypatch):
    """Run a test of drawing with either renderer: its module's MujocoRenderer is that one."""
    from warp_render import WarpRenderer

    if request.param == "warp":
        monkeypatch.setattr(request.module, "MujocoRenderer", WarpRenderer)
    return request.param
