"""What every test gets: its share of the cores, no network, a hypothesis profile, the folder of recorded data."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Set before torch and transformers are imported; what the caller has set stays.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork after its threads start would warn
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network fails at once, not after a timeout

# Time says nothing on a shared machine. CI draws the same examples each run, so a change is red for its own reasons.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compile the kernels before the first test: an engine would serve without them until they are ready."""
    if find_spec("numba") is not None:
        from prefixkv.kernels.readiness import compile_now

        compile_now()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of traces, conversations, chat templates and tokenizers; skips where it is absent."""
    path = Path(os.environ.get("PREFIXKV_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip("recorded data is absent; set PREFIXKV_DATA to its folder")
    return path


@pytest.fixture
def loaded_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every ``Engine.from_pretrained("demo")`` of a test use one copy of the demo model, loaded once."""
    from prefixkv.engine import engine
    from prefixkv.model.load import load
    from tests.support import demo_loaded

    def load_once(name: str, **options: Any) -> Any:
        is_demo = name == "demo" and options["dtype"] == options["device"] == "auto"
        return demo_loaded() if is_demo else load(name, **options)

    monkeypatch.setattr(engine, "load", load_once)
