"""What every test run has: hypothesis profiles, a seed that is printed, a watchdog, and the skip of GPU tests."""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import secrets
import sys
import warnings
import zlib
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.scheduler import LoadScopeScheduling

# Profile: (examples of a property, steps of a state machine).
PROFILES = {"dev": (20, 20), "ci": (50, 30), "nightly": (1000, 100)}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
# No deadline: two shared cores make single examples slow by chance. A failure prints the blob that replays it.
for _name, (_examples, _steps) in PROFILES.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        stateful_step_count=_steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
        # Explaining traces every line on Python 3.11: minutes, until the limit of a test hides what failed.
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
settings.load_profile(PROFILE)

SEED_VARIABLE = "DELTASTORE_TEST_SEED"
SESSION_SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**32))
os.environ[SEED_VARIABLE] = str(SESSION_SEED)  # the processes that run tests side by side draw the same

WATCHDOG_GRACE_SECONDS = 60.0
_stderr_key = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Before capturing begins, descriptor 2 is still the terminal; the watchdog must be heard when it ends the run.
    config.stash[_stderr_key] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr_key])


def pytest_report_header() -> str:
    return f"deltastore: HYPOTHESIS_PROFILE={PROFILE} {SEED_VARIABLE}={SESSION_SEED}"


COMPILES = ("test_prediction", "test_pytorch_bounded", "test_bounded")
"""Files whose tests wait for the compiled passes: one process makes them, the other tests something else meanwhile."""


class Files(LoadScopeScheduling):  # type: ignore[misc]
    """Deals out whole files to the processes that run tests side by side; what shares one HDFS stays together."""

    def _split_scope(self, nodeid: str) -> str:
        path = PurePosixPath(nodeid.partition("::")[0])
        if "hdfs" in path.parts:
            return "hdfs"
        return "compiled" if path.name.startswith(COMPILES) else str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _has_cuda():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_cuda() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old is reported as a warning, and means no
        return bool(importlib.import_module("torch").cuda.is_available())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the whole run when a test hangs where pytest-timeout cannot reach it: in C code that holds the GIL."""
    limit_seconds = _limit_seconds(item)
    if limit_seconds > 0:
        faulthandler.dump_traceback_later(
            limit_seconds + WATCHDOG_GRACE_SECONDS, exit=True, file=item.config.stash[_stderr_key]
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    stated = None if marker is None else (marker.args[0] if marker.args else marker.kwargs.get("timeout"))
    if stated is None:
        stated = item.config.getoption("timeout", None)
    if stated is None:
        stated = item.config.getini("timeout")
    return float(stated or 0)


def _test_seed(item: pytest.Item) -> int:
    return zlib.crc32(f"{SESSION_SEED}:{item.nodeid}".encode())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the global generators per test, so that neither order nor selection changes what a test draws."""
    seed = _test_seed(item)
    item.add_report_section("setup", "seed", f"{SEED_VARIABLE}={SESSION_SEED} (this test: {seed})")
    random.seed(seed)
    modules: dict[str, Any] = dict(sys.modules)  # only what is loaded already: tests of lazy imports stay light
    if "numpy" in modules:
        modules["numpy"].random.seed(seed)
    if "torch" in modules:
        modules["torch"].manual_seed(seed)
        modules["torch"].set_warn_always(True)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of this test: ``DELTASTORE_TEST_SEED`` of the run and the name of the test decide it."""
    return _test_seed(request.node)
