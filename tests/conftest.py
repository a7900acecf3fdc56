"""Settings of the whole test run."""

from __future__ import annotations

import torch

# Many small ops: on a busy machine the threads of each would wait for one another, up to six times
# as long as the work takes.
torch.set_num_threads(1)
