"""Settings for all tests. Nothing here imports torch: most tests do without it and start in a fraction of the time."""

import os
from typing import Any

import hypothesis
import pytest

# torch reads these when it is first imported, and subprocesses of tests inherit them. One thread: the models of the
# tests are too small to share, and on a busy machine two threads that wait for each other are 20 times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# No test downloads a model or a tokenizer.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine is not a bug: no example has a deadline. The same examples run each time, so that a failure of CI
# is a failure at a desk; `--hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--num-seeds", type=int, help="random schedules of each simulation; `make soak` runs 10,000")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, engines on a GPU are all built by one worker: they take most of its memory each."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # here, since a run without xdist reads this file too

    class OneWorkerPerGPU(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/gpu" if nodeid.startswith("tests/gpu/") else super()._split_scope(nodeid)

    return OneWorkerPerGPU(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need more CUDA devices than there are; ask torch only when such a test comes up."""
    num_needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if num_needed == 0:
        return
    import torch

    num_devices = torch.cuda.device_count()
    if num_devices < num_needed:
        pytest.skip(f"needs {num_needed} CUDA device(s), found {num_devices}")
