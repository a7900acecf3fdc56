"""What a training run leaves: the model folder, its checks, completions and model card.

Owns the files of `minivllm/assets/tiny/`; `train_tiny.py` owns the numbers in them.

    save(model, tokenizer, tokenizer_files, out)
    write_report(out, report)
"""

import copy
import json
import shutil
from pathlib import Path

import torch
from tiny_corpus import VOCAB_SIZE
from tiny_sources import OPENCC, SOURCES

MODEL_CARD = """\
---
license: mit
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


def save(model, tokenizer, tokenizer_files: Path, out: Path) -> None:
    """bf16 weights, config, generation config and tokenizer, in transformers' own layout."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to("cpu", torch.bfloat16)
    half.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(out)
    # Copied: saved again, its configuration would say where it was loaded from.
    shutil.copytree(tokenizer_files, out, dirs_exist_ok=True)
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


def write_report(out: Path, report: dict) -> None:
    """`training.json`, and the model card, which quotes it."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (out / "training.json").write_text(text, encoding="utf-8")
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
        padded=report["padded_vocab_size"],
        rows="\n".join(rows),
        nats=report["held_out_nats_per_token"],
        bits=report["held_out_bits_per_byte"],
        sources="\n".join(sources),
        opencc=OPENCC.partition("-")[0],
    )
    (out / "README.md").write_text(card, encoding="utf-8")
