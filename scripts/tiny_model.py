"""The tiny model: its configuration, its loss and its continuations, by transformers' forward.

Owns what a forward pass computes, in shapes and calls that a CUDA graph can hold; not which kernels
compute it (`tiny_kernels.py`), nor the training loop.

    model = build_model(tokenizer, "cuda"); token_losses(model, tokens).mean().backward()

Shapes: B rows, T tokens a row.
"""

import torch
from tiny_corpus import VOCAB_SIZE
from torch.nn import functional as F

PADDED_VOCAB_SIZE = 4160  # ids past the tokenizer's, like the padded head of the real checkpoints


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


def token_bytes(tokenizer) -> list[int]:
    """Bytes of text behind each id: a byte-level piece has one character a byte, specials none."""
    sizes = [len(piece) for piece in tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE))]
    for special in tokenizer.all_special_ids:
        sizes[special] = 0
    return sizes + [0] * (PADDED_VOCAB_SIZE - VOCAB_SIZE)


def add_dropout(model, probability: float) -> None:
    """Dropout on what each block adds to the residual stream, in training mode only."""

    def drop(module, _, output):
        return F.dropout(output, probability, module.training)

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "out_proj", "down_proj")):
            module.register_forward_hook(drop)


def autocast(device: torch.device):
    # Without its cache of cast weights, which must not outlive a CUDA graph's capture.
    on = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=False)


def hidden_states(model, ids: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B, T, hidden]."""
    # Masks of None, given as a mapping, mean causal. Left out, transformers would look for packed
    # sequences in the positions, which waits for the device and so cannot be captured.
    masks = {"full_attention": None, "linear_attention": None}
    return model.model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state


def token_losses(model, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token, fp32 [B, T], in nats; `tokens` is [B, T + 1]."""
    with autocast(tokens.device):
        logits = model.lm_head(hidden_states(model, tokens[:, :-1]))
    targets = tokens[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


@torch.no_grad()
def complete(model, tokenizer, prompts: dict[str, str], shape: tuple[int, int], length: int = 96):
    """Greedy continuations up to `length` tokens, by whole forward passes of the one `shape`.

    Without a cache, and padded on the right, which a causal model does not see: no kernel beyond
    those of the training has to be compiled.
    """
    window = torch.full(shape, tokenizer.pad_token_id, device=model.device)
    ends = [0] * len(prompts)
    for row, ids in enumerate(tokenizer(list(prompts.values())).input_ids):
        window[row, : len(ids)] = torch.tensor(ids)
        ends[row] = len(ids)
    rows, ends = torch.arange(len(ends), device=model.device), torch.tensor(ends).to(model.device)
    length = min(length, shape[1])
    while (ends < length).any():
        with autocast(model.device):
            logits = model.lm_head(hidden_states(model, window)[rows, ends - 1])
        at = ends.clamp(max=length - 1)
        window[rows, at] = torch.where(ends < length, logits.argmax(-1), window[rows, at])
        ends = (ends + 1).clamp(max=length)
    return {
        name: tokenizer.decode(ids)
        for name, ids in zip(prompts, window[rows, :length].tolist(), strict=True)
    }
