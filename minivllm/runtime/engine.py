"""The engine: requests come, steps run, tokens go.

Owns a request's way from a prompt to outputs, and the order of a step. Does not own building the
model (`build`), what a step consists of (`scheduler`), running it (`model_runner`), sampling
(`sampler`) or outputs (`generation`).

    engine = Engine(config)
    engine.add_request(prompt, SamplingParams())
    while engine.has_unfinished:
        for generation in engine.step(): ...

One thread at a time may call it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minivllm.compiler.compile import CompiledModel
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.errors import UserError
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.block_manager import BlockManager
from minivllm.runtime.build import build, max_context_tokens
from minivllm.runtime.detokenizer import IncrementalDetokenizer
from minivllm.runtime.generation import Completion, Generation
from minivllm.runtime.inputs import Prompt
from minivllm.runtime.logprobs import TokenLogprobs, prompt_logprobs
from minivllm.runtime.metrics import EngineMetrics
from minivllm.runtime.model_runner import StepLogits
from minivllm.runtime.outputs import Logprob
from minivllm.runtime.penalties import History, TokenCounts
from minivllm.runtime.profile import StepProfile
from minivllm.runtime.request import Request
from minivllm.runtime.resolve import resolve_device
from minivllm.runtime.sampler import OnItsWay, Sampled, on_its_way, sample
from minivllm.runtime.sampling_batch import SamplingBatch
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.scheduler import Scheduler, SchedulerLimits
from minivllm.runtime.snapshot_pool import SnapshotPool
from minivllm.runtime.state_slots import StateSlots
from minivllm.runtime.step import Chunk, Step
from minivllm.runtime.stop import StopChecker

logger = logging.getLogger(__name__)

LOGITS_ROWS = 256  # of a chunk of a prompt whose log-probabilities are wanted: the head is wide
SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class _Launched:
    """A step that the device has been given, and whose tokens nobody has taken.

    Attributes:
        completions: whose token is drawn, each with the request that it belongs to.
        sampled: the tokens; None if the step draws none.
        prompts: the log-probabilities of parts of prompts, where they are wanted.
    """

    completions: list[tuple[Generation, Completion]]
    sampled: OnItsWay | None
    prompts: list[_PromptPart]


@dataclass(frozen=True)
class _PromptPart:
    """Log-probabilities of a prompt's tokens from `start` on; on the device still.

    They are made right behind the step whose logits they are of: the next step may overwrite those.
    """

    generation: Generation
    completion: Completion
    start: int
    token_ids: list[int]
    found: TokenLogprobs

    def take(self, decode: Callable[[int], str | None]) -> None:
        """Append what the prompt has no entry for yet: a sequence that lost its place runs its
        prompt again, in other parts."""
        entries = self.generation.prompt_logprobs
        assert entries is not None and len(entries) >= self.start, "a part is missing"
        count = self.completion.request.params.prompt_logprobs or 0
        made = self.found.dicts(self.token_ids, [count] * len(self.token_ids), decode)
        entries += made[len(entries) - self.start :]


def takes_the_best(params: SamplingParams) -> bool:
    """Whether its token is the one of the highest logit, and nothing else is asked for."""
    edited = params.penalized or params.logit_bias or params.min_tokens
    return params.greedy and not edited and params.logprobs is None


def needs_history(params: SamplingParams) -> bool:
    """Whether a token cannot be drawn before the host has seen the one before it."""
    return params.penalized or params.min_tokens > 0


def _profile(options: RuntimeOptions) -> StepProfile | None:
    """The profile that is asked for.

    Raises:
        UserError: its folder cannot be written.
    """
    if options.profile is None:
        return None
    device = resolve_device(options.device)
    return StepProfile(Path(options.profile), options.profile_skip, options.profile_steps, device)


class Engine:
    """A model, its memory and its requests.

    Attributes:
        options: what it was built from.
        config: the architecture.
        device, dtype: where and in what the model runs.
        tokenizer: None where it was skipped, or where dummy weights came without one.
        max_model_len: longest sequence in tokens.
        max_num_seqs: most sequences that run at once.
        compiled: the graphs and their reports; None in reference mode.
        runner: executes steps.
        plan: the division of memory.
        scheduler: who runs, and with which memory.
        metrics: counters and times.
    """

    def __init__(self, options: EngineConfig) -> None:
        self.options = options
        if options.compiler.measure:
            raise UserError(
                "compiler.measure=true is for python -m minivllm.inspect, with the same arguments; "
                "the steps of a run are measured with runtime.profile=FOLDER"
            )
        self._profile: StepProfile | None = None
        profile = _profile(options.runtime)  # before the model is loaded: it may be impossible
        self._threads_before = torch.get_num_threads()
        try:
            built = build(options)
        except BaseException:
            self.close()
            raise
        self._profile = profile
        self.config, self.device, self.dtype = built.config, built.device, built.dtype
        self.tokenizer = built.tokenizer
        self.compiled: CompiledModel | None = built.compiled
        self.runner = built.runner
        self.plan = built.plan
        self.max_model_len = self.plan.max_model_len
        self.max_num_seqs = self.plan.max_num_seqs
        of_tokenizer = self.tokenizer.eos_token_ids if self.tokenizer else ()
        # a checkpoint may end a text at one, and its chat template a turn at another
        self.eos_token_ids = tuple(dict.fromkeys((*self.config.eos_token_ids, *of_tokenizer)))
        self.vocab_limit = built.vocab_limit
        sizes, cache = self.plan.sizes, options.runtime.prefix_cache
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=options.runtime.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                snapshot_interval=cache.snapshot_interval,
                prefix_caching=cache.enabled and self.compiled is not None,
                snapshots_on_the_way=self.runner.snapshots_on_the_way,
                max_logits_rows=LOGITS_ROWS,
                max_context_tokens=max_context_tokens(options.runtime, self.max_model_len),
            ),
            BlockManager(sizes.num_blocks, BLOCK_SIZE),
            StateSlots(sizes.num_slots),
            SnapshotPool(sizes.num_snapshots, sizes.num_host_snapshots),
        )
        self.metrics = EngineMetrics(self.scheduler, built.needs.slot)
        self._generations: dict[str, Generation] = {}
        self._completions: dict[Request, tuple[Generation, Completion]] = {}
        self._news: dict[Generation, None] = {}  # what step has yet to tell, in order
        self._launched: deque[_Launched] = deque()
        self._unprepared: list[IncrementalDetokenizer] = []  # of new requests
        asynchronous = options.runtime.async_scheduling
        if asynchronous is None:
            asynchronous = self.device.type == "cuda"
        self._one_ahead = asynchronous and self.compiled is not None
        self._need_history = 0  # completions whose sampling reads their own tokens
        self._number = 0
        self._seeds = 0  # given to requests that brought none

    def close(self) -> None:
        """End a profile, and give back what the engine changed: torch's number of threads."""
        if self._profile is not None:
            self._profile.end()
        torch.set_num_threads(self._threads_before)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would bring anything."""
        return bool(self._generations or self._news or self._launched)

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> Generation:
        """Queue a request; `step` brings it forward.

        Args:
            prompt: checked by `inputs.read_prompts`.
            params: of all its completions.
            request_id: to `abort` it by; None: counts from "0".

        Returns:
            Its outputs, as they will come.

        Raises:
            UserError: the id is in use, or the request could never run.
        """
        number = self._number
        if request_id is None:
            while str(number) in self._generations:  # somebody chose this one
                number += 1
            request_id = str(number)
        if request_id in self._generations:
            raise UserError(f"request_id={request_id!r} is in use by a request that still runs")
        self._check(prompt, params)
        self._number = number + 1
        first_seed = params.seed
        if first_seed is None:
            first_seed = self.options.runtime.seed * SEED_STEP + self._seeds
            self._seeds += params.n
        completions = [
            self._completion(f"{request_id}.{i}", prompt, params, (first_seed + i) % 2**64, i)
            for i in range(params.n)
        ]
        head, *forks = (c.request for c in completions)
        head.forks.extend(forks)
        generation = Generation(request_id, prompt, completions, time.perf_counter)
        if params.prompt_logprobs is not None:
            generation.prompt_logprobs = [None]
        self._generations[request_id] = generation
        self._completions |= {c.request: (generation, c) for c in completions}
        self._need_history += params.n * needs_history(params)
        self.scheduler.add(head)
        return generation

    def abort(self, request_id: str) -> None:
        """End a request at any stage; the next step brings its last output, "abort".

        Raises:
            UserError: there is no such request, or it has ended.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            running = ", ".join(map(repr, self._generations)) or "none"
            raise UserError(f"request_id={request_id!r}: no such request; there are: {running}")
        # forks first: they hang on their head as long as it has not been prefilled
        for completion in reversed(generation.completions):
            if not completion.finished:
                completion.end("abort")
                self._leave(completion)
        self.metrics.aborted += 1
        self._news[generation] = None

    def step(self) -> list[Generation]:
        """Launch one step, and take the tokens of the one before it (or its own).

        One step ahead, the device runs this step while the host takes the tokens of the last one.
        A request that these end has a row in this step for nothing; its token goes nowhere.

        Returns:
            The requests that got a token or came to their end, in the order of the step.
        """
        if self._profile is None:
            return self._step()
        with self._profile.step():
            return self._step()

    def _step(self) -> list[Generation]:
        if self._need_history:
            self._take(keep=0)
        launched = self._launch()
        self._take(keep=1 if launched and self._one_ahead else 0)
        idle = not self._generations and not self._launched
        if idle and self.options.runtime.check_integrity:
            self.scheduler.check_integrity()
        news, self._news = self._news, {}
        return list(news)

    def reset_prefix_cache(self) -> None:
        """Forget everything that is kept for later requests; running ones go on."""
        self.scheduler.reset_prefix_cache()

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        if params.n > self.max_num_seqs:
            raise UserError(
                f"n={params.n}: at most max_num_seqs={self.max_num_seqs} completions can run"
            )
        if not self.scheduler.fits(len(prompt.token_ids), params.n):
            raise UserError(
                f"n={params.n} completions of {len(prompt.token_ids)} tokens need more KV cache at "
                f"once than its {self.plan.sizes.num_blocks - 1} blocks of {BLOCK_SIZE}: lower n, "
                "or raise runtime.kv_cache_memory_bytes"
            )
        named = {"logit_bias": params.logit_bias or {}, "stop_token_ids": params.stop_token_ids}
        for name, ids in named.items():
            unknown = [i for i in ids or () if not 0 <= i < self.config.vocab_size]
            if unknown:
                raise UserError(
                    f"{name}: token id {unknown[0]} is outside the vocabulary, "
                    f"0 to {self.config.vocab_size - 1}"
                )

    def _completion(
        self, name: str, prompt: Prompt, params: SamplingParams, seed: int, index: int
    ) -> Completion:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer, prompt.token_ids, params.skip_special_tokens
            )
            self._unprepared.append(detokenizer)
        room = self.max_model_len - len(prompt.token_ids)
        ids = list(prompt.token_ids)
        return Completion(
            Request(
                name,
                ids,
                len(ids),
                params,
                seed,
                prompt.cache,
                final_length=len(ids) + min(room, params.max_tokens or room),
                packed_ids=prompt.packed_ids[:],
            ),
            index,
            StopChecker(params, self.eos_token_ids, detokenizer, room),
            counts=TokenCounts(ids, len(ids)) if params.penalized else None,
            logprobs=None if params.logprobs is None else [],
        )

    def _launch(self) -> bool:
        """Plan a step and hand it to the device; False: nothing is to be done."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        completions = [self._completions[request] for request in step.sampled]
        try:
            logits = self.runner.execute(step)
            prompts = [p for part in logits.prompt if (p := self._prompt_part(*part)) is not None]
            drawn = self._draw(step, logits, [c for _, c in completions]) if completions else None
        except BaseException:
            self._break_off(step)
            raise
        self.scheduler.advance(step)
        self.metrics.step(step)
        self._launched.append(_Launched(completions, drawn, prompts))
        while self._unprepared:
            self._unprepared.pop().prepare()
        return True

    def _break_off(self, step: Step) -> None:
        """A step broke off: how far it came is unknown, so all that it touched ends with it."""
        running = [*(chunk.request for chunk in step.prefill), *step.decode]
        self._fail(member for request in running for member in list(request.group()))
        self.scheduler.reset_prefix_cache()

    def _fail(self, requests: Iterable[Request]) -> None:
        """End requests of which not every token can be had; the next step tells."""
        for request in requests:
            if request not in self._completions:
                continue
            generation, completion = self._completions[request]
            completion.end("error")
            self._leave(completion, publish=False)
            self._news[generation] = None
            self.metrics.failed += generation.finished

    def _draw(self, step: Step, logits: StepLogits, completions: Sequence[Completion]) -> OnItsWay:
        """Choose each row's token on the device, and start it on its way to the host."""
        if logits.greedy is not None and all(takes_the_best(r.params) for r in step.sampled):
            return on_its_way(logits.greedy)
        sampled = self._sample(logits.sampled, completions)
        self.runner.store_tokens(step, sampled.token_ids)
        return on_its_way(torch.where(sampled.valid, sampled.token_ids, -1), sampled.logprobs)

    def _sample(self, logits: Tensor, completions: Sequence[Completion]) -> Sampled:
        requests = [c.request for c in completions]
        batch = SamplingBatch.build(
            [r.params for r in requests],
            [r.seed for r in requests],
            [r.num_tokens for r in requests],
            [History(r.token_ids, r.num_prompt_tokens, c.counts)
             for r, c in zip(requests, completions, strict=True)],
            self.eos_token_ids,
            self.device,
            self.vocab_limit,
        )  # fmt: skip
        return sample(logits, batch)

    def _take(self, keep: int) -> None:
        """Take the tokens of all launched steps but the last `keep`."""
        while len(self._launched) > keep:
            launched = self._launched.popleft()
            try:
                self._take_step(launched)
            except BaseException:
                self._fail(part.completion.request for part in launched.prompts)
                self._fail(completion.request for _, completion in launched.completions)
                raise

    def _take_step(self, launched: _Launched) -> None:
        """Give each request of a step its token; free those that end."""
        for part in launched.prompts:
            part.take(self._decode)
        if launched.sampled is None:
            return
        start = time.perf_counter()
        tokens = launched.sampled.wait()  # for the device, here and only here
        self.metrics.waited += time.perf_counter() - start
        requests = [c.request for _, c in launched.completions]
        entries = self._logprobs(requests, launched.sampled.logprobs, tokens)
        touched: dict[Generation, None] = {}
        taken = 0
        for i, (generation, completion) in enumerate(launched.completions):
            completion.request.in_flight -= 1
            if completion.finished:  # by the token before, or aborted
                continue
            valid = tokens[i] >= 0
            taken += valid
            if valid:
                ended = completion.append(tokens[i], entries.get(i))
            else:
                logger.error(
                    "request %s: its logits hold NaN or infinity, so it ends here",
                    generation.request_id,
                )
                completion.end("error")
                ended = True
            if ended:
                self._leave(completion, publish=valid)
            touched[generation] = self._news[generation] = None
        for generation in touched:
            generation.token_came()
        self.metrics.tokens(touched, taken)

    def _leave(self, completion: Completion, publish: bool = True) -> None:
        """A completion that has ended gives back what it holds."""
        request = completion.request
        self.scheduler.finish(request, publish=publish)
        generation, _ = self._completions.pop(request)
        self._need_history -= needs_history(request.params)
        if generation.finished:
            del self._generations[generation.request_id]

    def _logprobs(
        self, requests: Sequence[Request], found: TokenLogprobs | None, tokens: Sequence[int]
    ) -> dict[int, dict[int, Logprob]]:
        """Of each row that asked for them, by row."""
        if found is None:
            return {}
        rows = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        counts = [requests[i].params.logprobs or 0 for i in rows]
        entries = found.dicts([tokens[i] for i in rows], counts, self._decode)
        return dict(zip(rows, entries, strict=True))

    def _prompt_part(self, chunk: Chunk, logits: Tensor) -> _PromptPart | None:
        """Of a chunk's tokens; None: nothing in it comes before a token of the prompt."""
        request = chunk.request
        generation, completion = self._completions[request]
        end = min(chunk.end + 1, request.num_prompt_tokens)
        next_ids = request.token_ids[chunk.start + 1 : end]
        if generation.prompt_logprobs is None or completion.index > 0 or not next_ids:
            return None  # forks share the first one's
        count = request.params.prompt_logprobs or 0
        found = prompt_logprobs(logits[: len(next_ids)], next_ids, count, self.vocab_limit)
        return _PromptPart(generation, completion, chunk.start + 1, next_ids, found)

    def _decode(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], False)
