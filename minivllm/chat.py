"""`chat=true`: a conversation in the terminal, one line a turn.

Owns the three keys of a chat, its commands, Ctrl-C, and what is printed. Does not own what has been
said (`conversation`) nor generation (`LLM`).

    options = read_options(settings, config, sampling_params)   # None: it is no chat
    run_chat(llm, sampling_params, options)

Answers go to standard output, all else to standard error. Standard input may be a file or a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.conversation import ChatOptions, Conversation
from minivllm.errors import UserError

if TYPE_CHECKING:
    from types import FrameType

    from minivllm.config import EngineConfig
    from minivllm.runtime.llm import LLM
    from minivllm.runtime.outputs import RequestOutput
    from minivllm.runtime.sampling_params import SamplingParams

PROMPT = "> "
COMMAND = re.compile(r"/[A-Za-z]+")  # as a whole line; "/etc/hosts says …" is for the model
HELP = """\
/reset  forget the conversation and start a new one
/help   this list
/exit   end the chat, as does Ctrl-D
Ctrl-C  while an answer comes: end it, and keep what has come"""


def read_options(
    settings: Mapping[str, Any], config: EngineConfig, sampling_params: SamplingParams
) -> ChatOptions | None:
    """The options of a chat, or None where `chat` is false.

    Raises:
        UserError: a wrong type, or another key that does not go with a chat or needs one.
    """
    chat, thinking = settings.get("chat", False), settings.get("enable_thinking", False)
    for key, value in (("chat", chat), ("enable_thinking", thinking)):
        if not isinstance(value, bool):
            raise UserError(f"{key}: {value!r} is not one of: true, false")
    system = settings.get("system")
    if not chat:
        for key, given in (("system", system is not None), ("enable_thinking", thinking)):
            if given:
                raise UserError(f"{key}: only a chat has it; add chat=true")
        return None
    if system is not None and not (isinstance(system, str) and system.strip()):
        raise UserError(f"system: {system!r} is not a text; quote it twice: 'system=\"2024\"'")
    keys = ("prompt", "prompts", "prompt_file")
    beside = [key for key in keys if settings.get(key) is not None]
    if beside:
        raise UserError(
            f"chat and {' and '.join(beside)}: a chat reads what you say from standard input; "
            "give chat=true alone, with system=TEXT if you like"
        )
    if config.model.skip_tokenizer_init:
        raise UserError("model.skip_tokenizer_init: true leaves a chat without words; drop it")
    if sampling_params.n != 1:
        raise UserError(f"sampling.n: {sampling_params.n}: a chat has one answer a turn; drop it")
    return ChatOptions(system, thinking)


def run_chat(llm: LLM, sampling_params: SamplingParams, options: ChatOptions) -> None:
    """Talks until the end of the input or `/exit`.

    A turn that fails leaves a message and the conversation as it was.

    Raises:
        UserError: the model cannot chat, or, if nobody sits at the input, turns failed.
        KeyboardInterrupt: Ctrl-C twice at the prompt, or twice during an answer.
    """
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise UserError("a chat needs a tokenizer and there is none: name one, model.tokenizer=…")
    conversation = Conversation(tokenizer, options)
    if not sampling_params.ignore_eos:
        # some checkpoints name the end of a message in their tokenizer alone
        ends = dict.fromkeys([*(sampling_params.stop_token_ids or ()), *tokenizer.eos_token_ids])
        sampling_params = dataclasses.replace(sampling_params, stop_token_ids=tuple(ends))
    terminal = sys.stdin.isatty()
    if terminal:
        _tell("one line is one turn; /help lists the commands")
    turns = failed = 0
    for line in _terminal_lines() if terminal else _piped_lines():
        text = line.strip()
        if not text:
            continue
        if not terminal:
            _tell(f"{PROMPT}{text}")
        if COMMAND.fullmatch(text):
            if text.lower() == "/exit":
                break
            _obey(text.lower(), conversation)
            continue
        turns += 1
        try:
            with _first_interrupt_waits() as interrupted:
                _take_turn(llm, sampling_params, conversation, text, interrupted)
        except UserError as error:
            failed += 1
            _tell(f"no answer: {error}")
    if failed and not terminal:
        raise UserError(f"{failed} of {turns} turns got no answer")


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/reset":
        conversation.reset()
        _tell("the conversation is forgotten")
    else:
        _tell(HELP if command == "/help" else f"{command}: no such command; there are\n{HELP}")


def _take_turn(
    llm: LLM,
    sampling_params: SamplingParams,
    conversation: Conversation,
    text: str,
    interrupted: Callable[[], bool],
) -> None:
    prompt = conversation.ask(text)
    length, most = len(prompt["prompt_token_ids"]), llm.engine.max_model_len
    if length >= most:
        raise UserError(
            f"with this message the conversation has {length} tokens, and max_model_len={most} "
            "leaves no room for an answer; /reset starts a new one, a shorter message may still fit"
        )
    output = _print_answer(llm, prompt, sampling_params, interrupted)
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise UserError("the model gave NaN or infinity; this turn is forgotten")
    conversation.answer(completion)
    _tell(_turn_line(output, most))


def _print_answer(
    llm: LLM,
    prompt: dict[str, Any],
    sampling_params: SamplingParams,
    interrupted: Callable[[], bool],
) -> RequestOutput:
    """The last output of an answer, which was printed as it came; unfinished if interrupted."""
    output = None
    stream: Any = llm.stream([prompt], sampling_params)
    with contextlib.closing(stream):  # which aborts the request if it still runs
        for output in stream:
            print(output.outputs[0].delta, end="", flush=True)
            if interrupted():
                break
    print(flush=True)
    assert output is not None, "a request ends with an output"
    return output


@contextlib.contextmanager
def _first_interrupt_waits() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed; only a second one is a KeyboardInterrupt.

    An exception in the middle of a step would leave the engine with half of it done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _turn_line(output: RequestOutput, most: int) -> str:
    """What a turn took, and what cut it off."""
    completion, metrics = output.outputs[0], output.metrics
    reused, count = output.num_cached_tokens, len(completion.token_ids)
    seconds = metrics.generation_time
    parts = [
        f"{len(output.prompt_token_ids) - reused} new + {reused} reused prompt tokens",
        f"{count} generated",
        f"TTFT {metrics.time_to_first_token * 1000:.1f} ms",
        f"{(count - 1) / seconds:.1f} tok/s" if count > 1 and seconds else "- tok/s",
    ]
    if not output.finished:
        parts.append("interrupted")
    elif completion.finish_reason == "length":
        full = len(output.prompt_token_ids) + count >= most
        limit = f"max_model_len={most}" if full else f"sampling.max_tokens={count}"
        parts.append(f"cut off at {limit}")
    return f"[{' | '.join(parts)}]"


def _terminal_lines() -> Iterator[str]:
    """Lines that a person types, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() edits lines and remembers them
    shown = sys.stdout.isatty()  # else input() would write its prompt into a file
    pressed = False
    while True:
        try:
            if not shown:
                print(PROMPT, end="", file=sys.stderr, flush=True)
            line = input(PROMPT if shown else "")
        except EOFError:
            _tell("")
            return
        except KeyboardInterrupt:
            if pressed:
                _tell("")
                raise
            pressed = True
            _tell("\n(Ctrl-C again, Ctrl-D or /exit ends the chat)")
            continue
        except UnicodeDecodeError:
            _tell("this line is not valid text; try again")
            continue
        pressed = False
        yield line


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input, line {number}: not UTF-8 text ({error.reason})"
            ) from None
        yield text


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
