"""The corpus of the tiny model: documents, tokenizer and token ids, made where there is a network.

    python scripts/tiny_corpus.py fetch      # download the sources -> .train/packages/
    python scripts/tiny_corpus.py corpus     # collect the documents -> .train/corpus.jsonl.xz
    python scripts/tiny_corpus.py tokenize   # -> .train/tokenizer/ and .train/tokens.npz

`train_tiny.py` reads the result of the last stage alone, through `load_encoded`. Each stage is
deterministic: the same archives, Python and `tokenizers` give the same ids.
"""

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from tiny_sources import DOWNLOADS, SOURCES

HELD_OUT_ONE_IN = 50
VOCAB_SIZE = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Qwen's pre-tokenizer: contractions, words, single digits, punctuation, line ends, blanks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class UsageError(ValueError):
    """What the user can put right; shown without a traceback."""


def is_held_out(name: str) -> bool:
    """By the name alone, which is a poem's first line, so that its variants stay together."""
    key = "".join(filter(str.isalnum, name))
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions(packages: list[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # FLA is absent in a smoke test
    return found


def run(stage: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    try:
        stage(args)
    except UsageError as error:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}") from error


# --- documents --------------------------------------------------------------------------------


def fetch(args: argparse.Namespace) -> None:
    """Download the pinned sources, each through its own package manager."""
    args.packages.mkdir(parents=True, exist_ok=True)
    for archive, command in DOWNLOADS.items():
        if not (args.packages / archive).exists():
            print(f"{archive}: {' '.join(command)}", flush=True)
            subprocess.run(command, cwd=args.packages, check=True)


def corpus(args: argparse.Namespace) -> None:
    """Collect the documents into one file: a header line, then one JSON object a document."""
    missing = [name for name in DOWNLOADS if not (args.packages / name).exists()]
    if missing:
        raise UsageError(f"{args.packages} lacks {', '.join(missing)}: run the fetch stage first")
    header = {
        "python": sys.version.split()[0],
        "archives": {name: sha256(args.packages / name) for name in sorted(DOWNLOADS)},
        "licences": {source.name: source.licence for source in SOURCES},
    }
    args.corpus.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(args.corpus, "wt", encoding="utf-8", newline="\n") as out:
        out.write(json.dumps(header) + "\n")
        for source in SOURCES:
            size = {"train": 0, "held_out": 0}
            for name, text in source.read(args.packages / source.archive):
                text = text.strip() + "\n"
                split = "held_out" if is_held_out(name) else "train"
                size[split] += len(text.encode())
                row = {"source": source.name, "split": split, "text": text}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"{source.name:16} {size['train']:>10,} + {size['held_out']:>8,} bytes held out")
    print(f"{args.corpus}: {args.corpus.stat().st_size:,} bytes, sha256 {sha256(args.corpus)}")


def load_corpus(path: Path) -> tuple[dict, dict[str, dict[str, list[str]]]]:
    """The header, and texts by source and split."""
    if not path.exists():
        raise UsageError(f"{path} is missing: run the fetch and corpus stages first")
    texts = {source.name: {"train": [], "held_out": []} for source in SOURCES}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        header = json.loads(next(lines))
        for row in map(json.loads, lines):
            texts[row["source"]][row["split"]].append(row["text"])
    return header, texts


# --- tokens -----------------------------------------------------------------------------------


def train_tokenizer(texts: dict[str, dict[str, list[str]]], sample_bytes: int):
    """Byte-level BPE over a sample mixed by the sources' shares; a transformers fast tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample: list[str] = []
    for source in SOURCES:
        left = source.sample * sample_bytes
        documents = texts[source.name]["train"]
        # A stride spreads a short sample over the whole source.
        stride = max(1, int(sum(len(text.encode()) for text in documents) / left))
        for text in documents[::stride]:
            sample.append(text[: max(0, int(left))])
            left -= len(text.encode())
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def encode(tokenizer, documents: list[str], seed: int) -> np.ndarray:
    """One stream of ids, uint16 [tokens]: the documents shuffled, an end-of-text after each."""
    order = np.random.default_rng(seed).permutation(len(documents))
    encoded = tokenizer.backend_tokenizer.encode_batch([documents[index] for index in order])
    ids = [token for row in encoded for token in [*row.ids, tokenizer.eos_token_id]]
    return np.array(ids, dtype=np.uint16)


def tokenize(args: argparse.Namespace) -> None:
    """Train the tokenizer and encode every document."""
    header, texts = load_corpus(args.corpus)
    tokenizer = train_tokenizer(texts, args.tokenizer_bytes)
    args.encoded.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.encoded / "tokenizer")
    arrays = {
        f"{split}/{source.name}": encode(tokenizer, texts[source.name][split], args.seed)
        for source in SOURCES
        for split in ("train", "held_out")
    }
    about = {
        "corpus_sha256": sha256(args.corpus),
        "corpus": header,
        "tokenizer_bytes": args.tokenizer_bytes,
        "shuffle_seed": args.seed,
        "encoded_with": versions(["tokenizers", "transformers", "numpy"]),
    }
    samples = [texts[source.name]["train"][0] for source in SOURCES]
    path = args.encoded / "tokens.npz"
    text = json.dumps({"about": about, "samples": samples}, ensure_ascii=False)
    np.savez_compressed(path, header=np.frombuffer(text.encode(), np.uint8), **arrays)
    tokens = sum(map(len, arrays.values()))
    print(f"{path}: {tokens:,} tokens, {path.stat().st_size:,} bytes, sha256 {sha256(path)}")


@dataclass(frozen=True)
class Encoded:
    """What the tokenize stage leaves, as `train_tiny.py` reads it."""

    tokenizer: object  # a transformers fast tokenizer
    tokenizer_files: Path
    train: dict[str, np.ndarray]  # by source, uint16 [tokens]
    held_out: dict[str, np.ndarray]
    samples: list[str]  # a training document of each source
    about: dict  # facts for training.json


def load_encoded(folder: Path) -> Encoded:
    from transformers import AutoTokenizer

    path = folder / "tokens.npz"
    if not path.exists():
        raise UsageError(f"{path} is missing: run `tiny_corpus.py tokenize` first")
    with np.load(path) as arrays:
        header = json.loads(arrays["header"].tobytes())
        train, held_out = (
            {source.name: arrays[f"{split}/{source.name}"] for source in SOURCES}
            for split in ("train", "held_out")
        )
    files = folder / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(files)
    return Encoded(tokenizer, files, train, held_out, header["samples"], header["about"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stages = parser.add_subparsers(required=True, metavar="fetch|corpus|tokenize")
    for stage in (fetch, corpus, tokenize):
        sub = stages.add_parser(stage.__name__, help=stage.__doc__)
        sub.set_defaults(stage=stage)
        if stage is not tokenize:
            sub.add_argument("--packages", type=Path, default=Path(".train/packages"))
        if stage is not fetch:
            sub.add_argument("--corpus", type=Path, default=Path(".train/corpus.jsonl.xz"))
    sub.add_argument("--encoded", type=Path, default=Path(".train"), help="folder to write to")
    sub.add_argument("--tokenizer-bytes", type=int, default=24_000_000, help="BPE training sample")
    sub.add_argument("--seed", type=int, default=0, help="of the order of the documents")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    run(arguments.stage, arguments)
