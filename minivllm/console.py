"""What a run prints: the text as it is generated, headers between prompts, one summary line.

Owns the format of standard output, whose last line is the summary. Does not own generation nor
the timing: `LLM` measures.

    outputs = print_stream(llm, ["Once upon a time"], SamplingParams())
    print(summary(outputs, llm, "compiled"))
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.prompts import Prompt

if TYPE_CHECKING:
    from minivllm.runtime.llm import LLM
    from minivllm.runtime.outputs import RequestOutput
    from minivllm.runtime.sampling_params import SamplingParams

SHOWN = 60  # characters of a prompt in a header


def print_stream(
    llm: LLM, prompts: Sequence[Prompt], sampling_params: SamplingParams
) -> list[RequestOutput]:
    """Generates for one prompt after another, printing text (without a tokenizer: ids) at once.

    A line with the prompt precedes each: on standard error for a single prompt, so that standard
    output holds nothing but its completion and the summary. Without a tokenizer, the bytes of a
    prompt's UTF-8 stand in for token ids.

    Returns:
        The finished outputs, in the order of the prompts.
    """
    inputs = list(prompts)
    if llm.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        print("no tokenizer: the prompt's bytes stand in for token ids", file=sys.stderr)
        inputs = [list(p.encode("utf-8")) if isinstance(p, str) else p for p in prompts]
    finished: list[RequestOutput] = []
    printed = 0  # characters or ids of the current request
    started = False
    for output in llm.stream(inputs, sampling_params):
        if not started:
            _print_header(len(finished), prompts)
            started, printed = True, 0
        completion = output.outputs[0]
        if llm.tokenizer is None:
            new = completion.token_ids[printed:]
            print(*new, end=" ", flush=True)
            printed += len(new)
        else:
            print(completion.text[printed:], end="", flush=True)
            printed = len(completion.text)
        if output.finished:
            print()
            finished.append(output)
            started = False
    return finished


def summary(outputs: Sequence[RequestOutput], llm: LLM, mode: str) -> str:
    """One line: tokens, mean TTFT, decode speed, device, dtype, mode, implementations.

    tok/s counts the tokens after each request's first over the time that they took.
    """
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = sum(output.metrics.time_to_first_token for output in outputs) / len(outputs)
    decode_time = sum(output.metrics.generation_time for output in outputs)
    decoded = generated - len(outputs)
    speed = f"{decoded / decode_time:.1f} tok/s" if decoded and decode_time else "- tok/s"
    ops = " ".join(f"{op}={name}" for op, name in sorted(llm.implementations.items()))
    return " | ".join(
        [
            f"{prompt_tokens} prompt + {generated} generated tokens",
            f"TTFT {first * 1000:.1f} ms",
            speed,
            f"{llm.device} {str(llm.dtype).removeprefix('torch.')} {mode}",
            f"ops: {ops}",
        ]
    )


def tolerate_any_text() -> None:
    """Lets standard output replace what its encoding lacks, rather than stop a generation."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _print_header(index: int, prompts: Sequence[Prompt]) -> None:
    text = repr(prompts[index])
    text = text if len(text) <= SHOWN else text[:SHOWN] + "…"
    if len(prompts) == 1:
        print(f"prompt: {text}", file=sys.stderr, flush=True)
    else:
        print(f"--- prompt {index + 1} of {len(prompts)}: {text}", flush=True)
