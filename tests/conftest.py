"""With `pytest -n 2` the tests of a file stay together, for what they share, and so do all that may
start a Ray cluster, which others would find."""

import pytest

RAY = "test_ray test_examples test_benchmarks test_containers".split()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    for item in items:
        module = item.module.__name__
        if module != "test_trust":  # minutes, and shares nothing
            item.add_marker(pytest.mark.xdist_group("ray" if module in RAY else module))
