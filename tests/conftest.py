"""Settings of the whole test run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import minivllm.compiler.graph_cache as graph_cache

# Many small ops: on a busy machine the threads of each would wait for one another, up to six times
# as long as the work takes.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported by now stays, so the garbage collector need not look through it every time.

    torch and what tests import are 400,000 objects: a tenth of the time of tests that compile.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_graphs_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's cache of graphs, nothing is left there.

    Here there is none, since tests put wrong models and passes in the place of ours, which a key
    does not know of. Processes that are started share one of this run's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user_cache")))
        patch.setattr(graph_cache, "default_folder", lambda: None)
        yield
