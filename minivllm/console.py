"""What a run prints: the text as it is generated, headers between texts, one summary line.

Owns the format of standard output, whose last line is the summary, and the order of texts that are
generated at the same time. Does not own generation nor the timing: `LLM` measures.

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
    from minivllm.runtime.outputs import CompletionOutput, RequestOutput
    from minivllm.runtime.sampling_params import SamplingParams

SHOWN = 60  # characters of a prompt in a header


def print_stream(
    llm: LLM, prompts: Sequence[Prompt], sampling_params: SamplingParams
) -> list[RequestOutput]:
    """Generates for all prompts together, printing their texts (without a tokenizer: ids) in order.

    The first text that is not finished is printed as it grows, the others when its end gives them
    their turn. A line with the prompt precedes each: on standard error for a single prompt, so that
    standard output holds nothing but its completion and the summary. Each of several completions
    has a line too. Without a tokenizer, the bytes of a prompt's UTF-8 stand in for token ids.

    Args:
        llm: one that has had no request yet, so that the ids of these count from "0".

    Returns:
        The finished outputs, in the order of the prompts.
    """
    inputs = list(prompts)
    if llm.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        print("no tokenizer: the prompt's bytes stand in for token ids", file=sys.stderr)
        inputs = [list(p.encode("utf-8")) if isinstance(p, str) else p for p in prompts]
    printer = _Printer(prompts, sampling_params.n, ids=llm.tokenizer is None)
    latest: dict[int, RequestOutput] = {}
    for output in llm.stream(inputs, sampling_params):
        index = int(output.request_id)
        assert 0 <= index < len(prompts), f"request {index} of {len(prompts)} prompts"
        latest[index] = output
        printer.show(latest)
    return [latest[index] for index in range(len(prompts))]


class _Printer:
    """Prints texts that grow at the same time one after another.

    Args:
        prompts: for the headers.
        n: completions of each.
        ids: print token ids, since there is no text.
    """

    def __init__(self, prompts: Sequence[Prompt], n: int, ids: bool) -> None:
        self._prompts, self._n, self._ids = prompts, n, ids
        self._turn = 0  # of the text that is being printed: prompt * n + completion
        self._printed: int | None = None  # characters or ids of it; None: not even its header

    def show(self, latest: dict[int, RequestOutput]) -> None:
        """Print what the latest outputs, by prompt, allow."""
        while self._turn // self._n in latest:
            prompt, number = divmod(self._turn, self._n)
            completion = latest[prompt].outputs[number]
            if self._printed is None:
                self._print_headers(prompt, number)
                self._printed = 0
            self._print_new(completion)
            if completion.finish_reason is None:
                return
            print(flush=True)
            if completion.finish_reason == "error":
                self._print_error(prompt, number)
            self._turn, self._printed = self._turn + 1, None

    def _print_new(self, completion: CompletionOutput) -> None:
        if self._ids:
            new = completion.token_ids[self._printed :]
            print(*new, end=" " if new else "", flush=True)
            self._printed = len(completion.token_ids)
        else:
            print(completion.text[self._printed :], end="", flush=True)
            self._printed = len(completion.text)

    def _print_headers(self, prompt: int, number: int) -> None:
        if number == 0:
            text = repr(self._prompts[prompt])
            text = text if len(text) <= SHOWN else text[:SHOWN] + "…"
            if len(self._prompts) == 1:
                print(f"prompt: {text}", file=sys.stderr, flush=True)
            else:
                print(f"--- prompt {prompt + 1} of {len(self._prompts)}: {text}", flush=True)
        if self._n > 1:
            print(f"--- completion {number + 1} of {self._n}", flush=True)

    def _print_error(self, prompt: int, number: int) -> None:
        which = f"prompt {prompt + 1}" + (f", completion {number + 1}" if self._n > 1 else "")
        message = "the model gave NaN or infinity instead of numbers to draw from; it ends here"
        print(f"error: {which}: {message}", file=sys.stderr, flush=True)


def summary(outputs: Sequence[RequestOutput], llm: LLM, mode: str) -> str:
    """One line: tokens, mean TTFT, decode speed, device, dtype, mode, implementations.

    tok/s is that of all requests together: the tokens after each completion's first, over the time
    from the first token of all to the last.
    """
    completions = [completion for output in outputs for completion in output.outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    generated = sum(len(c.token_ids) for c in completions)
    decoded = generated - sum(bool(c.token_ids) for c in completions)
    # requests start together, so that their times can be compared
    times = [o.metrics for o in outputs if any(c.token_ids for c in o.outputs)]
    firsts = [t.time_to_first_token for t in times]
    lasts = [t.time_to_first_token + t.generation_time for t in times]
    seconds = max(lasts) - min(firsts) if times else 0.0
    ops = " ".join(f"{op}={name}" for op, name in sorted(llm.implementations.items()))
    return " | ".join(
        [
            f"{prompt_tokens} prompt{f' ({cached} cached)' if cached else ''}"
            f" + {generated} generated tokens",
            f"TTFT {sum(firsts) / len(firsts) * 1000:.1f} ms" if times else "TTFT - ms",
            f"{decoded / seconds:.1f} tok/s" if decoded and seconds else "- tok/s",
            f"{llm.device} {str(llm.dtype).removeprefix('torch.')} {mode}",
            f"ops: {ops}",
        ]
    )


def tolerate_any_text() -> None:
    """Lets standard output replace what its encoding lacks, rather than stop a generation."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
