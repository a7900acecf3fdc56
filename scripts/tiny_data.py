"""The tiny model's batches and held-out windows, as tensors on the training's device.

Shapes: B rows, T tokens a row, W windows of the held-out text, S sources.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from tiny_sources import SOURCES
from torch.nn import functional as F


class Batches:
    """Random windows of the training streams; all tokens live on the device.

    `starts` draws on the host, for many steps at once; `gather` only reads the device, so that a
    CUDA graph can hold it.
    """

    def __init__(self, streams: dict[str, np.ndarray], rows: int, seq_len: int, seed: int, device):
        lengths = torch.tensor([len(stream) for stream in streams.values()])
        tokens = np.concatenate(list(streams.values())).astype(np.int32)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.window = torch.arange(seq_len + 1, device=device)
        self.rows = rows
        self.begin = lengths.cumsum(0) - lengths
        self.choices = lengths - seq_len  # windows that end within their source
        self.weights = torch.tensor([source.weight for source in SOURCES])
        self.generator = torch.Generator().manual_seed(seed)

    def starts(self, steps: int) -> torch.Tensor:
        """First positions, int64 [steps, B]; the source is drawn for each row."""
        count = steps * self.rows
        chosen = self.weights.multinomial(count, replacement=True, generator=self.generator)
        share = torch.rand(count, dtype=torch.float64, generator=self.generator)
        offsets = (share * self.choices[chosen]).long()
        return (self.begin[chosen] + offsets).view(steps, self.rows).to(self.tokens.device)

    def gather(self, starts: torch.Tensor) -> torch.Tensor:
        """int64 [B, T + 1]."""
        return self.tokens[starts[:, None] + self.window].long()


class HeldOut:
    """The held-out streams cut into windows; every batch has the training's shape [B, T + 1].

    Triton's kernels are then compiled already. `bytes_of` is the length of each id's text.
    """

    def __init__(
        self,
        streams: dict[str, np.ndarray],
        rows: int,
        seq_len: int,
        bytes_of: list[int],
        device,
        limit: int | None = None,
    ):
        windows, real, source = [], [], []
        for number, stream in enumerate(streams.values()):
            stream = torch.from_numpy(stream.astype(np.int64))[:limit]
            padding = -len(stream) % (seq_len + 1)
            windows.append(F.pad(stream, (0, padding)).view(-1, seq_len + 1))
            real.append(F.pad(torch.ones_like(stream), (0, padding)).view(-1, seq_len + 1))
            source += [number] * len(windows[-1])
        fill = -len(source) % rows  # whole batches; a row that is not real counts nothing

        def stack(parts):
            return F.pad(torch.cat(parts), (0, 0, 0, fill)).to(device)

        self.windows, self.real = stack(windows), stack(real)[:, 1:]
        self.source = F.pad(torch.tensor(source), (0, fill)).to(device)
        self.rows = rows
        self.tokens = self.by_source(self.real)
        self.bytes = self.by_source(torch.tensor(bytes_of, device=device)[self.windows[:, 1:]])

    def by_source(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of values [W, T] over the real tokens of each source, float64 [S]."""
        sums = torch.zeros(len(SOURCES), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.source, (values.double() * self.real).sum(1))

    def evaluate(self, token_losses: Callable) -> dict[str, dict[str, float]]:
        """Loss by source, in nats a token and bits a byte; `token_losses`: [B, T + 1] -> [B, T]."""
        with torch.no_grad():
            losses = torch.cat([token_losses(part) for part in self.windows.split(self.rows)])
        nats = self.by_source(losses)
        return {
            source.name: {
                "nats_per_token": round(nats_per_token, 4),
                "bits_per_byte": round(bits_per_byte, 4),
            }
            for source, nats_per_token, bits_per_byte in zip(
                SOURCES,
                (nats / self.tokens).tolist(),
                (nats / math.log(2) / self.bytes).tolist(),
                strict=True,
            )
        }


def mixture(losses: dict[str, dict[str, float]], unit: str) -> float:
    """Mean over the sources, by their weights."""
    return round(sum(source.weight * losses[source.name][unit] for source in SOURCES), 4)
