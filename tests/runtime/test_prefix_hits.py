"""What the prefix cache brings is what would have been computed: a hit, a miss, in chunks, at once.

Also how much it brings: over turns of a chat, behind a shared beginning, and where one of the two
kinds of memory has forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engines import (
    KINDS,
    VOCAB,
    Builder,
    assert_idle,
    assert_result,
    checkpoint,
    drain,
    result,
    set_budget,
    step,
)
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.runtime.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
EDGES = [64 * k + d for k in range(3, 18) for d in range(-2, 3)]
LENGTHS = [*range(1, 131), *EDGES]
FEW = [1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 200, 257]
BUDGETS = [1, 7, 16, 63, 64, 65, 512]


@pytest.fixture(scope="module", params=KINDS)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")), *request.param, tolerance=1e-5)


@pytest.fixture(scope="module")
def roomy(build: Builder) -> LLM:
    return build(blocks=128, snapshots=64)


@pytest.fixture
def llm(roomy: LLM) -> LLM:
    """An engine with an empty cache."""
    set_budget(roomy, 8192)
    roomy.reset_prefix_cache()
    return roomy


@pytest.fixture(params=[False, True], ids=["in_step", "one_ahead"])
def either(request: pytest.FixtureRequest, build: Builder) -> LLM:
    """An engine that waits for a step's tokens, or launches the next one before."""
    return build(blocks=128, snapshots=64, async_scheduling=request.param)


def ids_of(length: int, seed: int = 0) -> list[int]:
    if (length, seed) == (2, 0):
        # ill-conditioned: a change of the weights by one ulp of float32 moves the logits by 1.3e-5
        # of the largest, ten times as much as with other lengths and seeds
        seed = 2
    return random_ids(length, VOCAB, seed=seed * 10_000 + length)


def ask(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def blocks_before_the_last_token(length: int) -> int:
    return (length - 1) // 64 * 64


def computed(llm: LLM) -> int:
    """Prompt tokens computed so far."""
    return int(llm.metrics["prompt_tokens"])


def check_miss_and_hit(build: Builder, llm: LLM, ids: list[int]) -> None:
    """Twice the same prompt, whose first blocks the cache does not have: both as it is cold."""
    before = computed(llm)
    for cached in (0, blocks_before_the_last_token(len(ids))):
        output = ask(llm, ids)
        assert output.num_cached_tokens == cached
        assert_result(build, llm, ids, GREEDY, output)
    assert computed(llm) - before == 2 * len(ids) - cached


@pytest.mark.parametrize("part", range(4))
def test_every_length(part: int, build: Builder, llm: LLM) -> None:
    set_budget(llm, 512)
    for length in LENGTHS[part::4]:
        check_miss_and_hit(build, llm, ids_of(length))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget(budget: int, build: Builder, llm: LLM) -> None:
    set_budget(llm, budget)
    for length in FEW:
        check_miss_and_hit(build, llm, ids_of(length))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_length_with_every_budget(budget: int, part: int, build: Builder, llm: LLM) -> None:
    set_budget(llm, budget)
    for length in LENGTHS[part::8]:
        check_miss_and_hit(build, llm, ids_of(length))


@pytest.mark.parametrize("budget", [16, 65, 512])
def test_a_long_prompt(budget: int, build: Builder, llm: LLM) -> None:
    """Just behind a boundary, where all that is known comes from the cache."""
    set_budget(llm, budget)
    for length in (1025, 1026, 1090):
        check_miss_and_hit(build, llm, ids_of(length))


def test_turns_of_a_chat(build: Builder, either: LLM) -> None:
    """Each turn computes what is new, and at most a block beside it.

    The last boundary lies in the prompt, or in the answer: behind one or several blocks of it.
    """
    turns = [
        (150, 8),
        (30, 8),
        (1, 8),
        (47, 8),
        (1, 130),
        (1, 8),
        (64, 8),
        (40, 8),
        (2, 8),
        (130, 8),
    ]
    history: list[int] = []
    in_answers = 0
    for turn, (new, answer) in enumerate(turns):
        params = replace(GREEDY, max_tokens=answer)
        prompted = len(history) - turns[turn - 1][1]
        history += ids_of(new, seed=turn + 1)
        before = computed(either)
        output = ask(either, history, params)
        assert_result(build, either, history, params, output)
        assert output.num_cached_tokens == len(history) - (computed(either) - before)
        # the last token of the answer before this turn has never been computed
        assert computed(either) - before <= new + 1 + 63, turn
        in_answers += output.num_cached_tokens > prompted > 0
        history += output.outputs[0].token_ids
    assert len(history) > 650 and in_answers >= 3


@pytest.mark.parametrize("changed", [10, 64, 130, 263, 264, 400])
def test_a_rewritten_history(changed: int, build: Builder, either: LLM) -> None:
    """Everything before the first changed token may be reused, and nothing behind it."""
    params = replace(GREEDY, max_tokens=8)
    history: list[int] = []
    for turn in range(6):
        history += ids_of(72, seed=turn + 1)
        history += ask(either, history, params).outputs[0].token_ids
    rewritten = [*history[:changed], (history[changed] + 1) % VOCAB, *history[changed + 1 :]]
    output = ask(either, rewritten, params)
    # a turn ends every 80 tokens, and leaves the state of the last boundary before that
    assert 0 <= changed // 64 * 64 - output.num_cached_tokens <= 128
    assert output.num_cached_tokens <= changed
    assert_result(build, either, rewritten, params, output)
    again = ask(either, rewritten + ids_of(30), params)
    assert again.num_cached_tokens >= blocks_before_the_last_token(len(rewritten))
    assert_result(build, either, rewritten + ids_of(30), params, again)


@pytest.mark.parametrize(
    ("shared", "suffix"), [(300, 10), (300, 150), (256, 1), (256, 64), (64, 9)]
)
def test_a_shared_beginning(shared: int, suffix: int, build: Builder, llm: LLM) -> None:
    """The third request finds it at the latest: the second leaves the state where they part.

    The second finds it where the first one's last boundary lies within it.
    """
    system = ids_of(shared)
    cached = []
    for seed in range(1, 6):
        ids = system + ids_of(suffix, seed)
        output = ask(llm, ids)
        assert_result(build, llm, ids, GREEDY, output)
        cached.append(output.num_cached_tokens)
    whole = shared // 64 * 64
    at_once = (shared + suffix) // 64 * 64 == whole or (shared + suffix - 1) // 64 * 64 == whole
    assert cached == [0, whole if at_once else 0, whole, whole, whole]


def test_reuse_never_falls_as_more_is_shared(build: Builder, llm: LLM) -> None:
    base = ids_of(330)
    reused = []
    for shared in [0, 1, 63, 64, 65, 100, 127, 128, 191, 192, 193, 256, 300, 319, 320, 321, 329]:
        llm.reset_prefix_cache()
        ask(llm, base)
        cached = []
        for seed in (1, 2):
            other = (base[shared] + seed) % VOCAB if shared < len(base) else 0
            ids = [*base[:shared], other, *ids_of(40, seed)]
            output = ask(llm, ids)
            assert_result(build, llm, ids, GREEDY, output)
            cached.append(output.num_cached_tokens)
        assert cached[1] == shared // 64 * 64
        reused.append(cached)
    for before, after in itertools.pairwise(reused):
        assert after[0] >= before[0] and after[1] >= before[1]


@pytest.mark.parametrize("budget", [64, 100, 8192])
@pytest.mark.parametrize("length", [65, 128, 200, 300])
def test_equal_prompts_in_one_call(length: int, budget: int, build: Builder, either: LLM) -> None:
    """One computes, the others wait for what it leaves."""
    set_budget(either, budget)
    ids = ids_of(length)
    before = computed(either)
    outputs = either.generate([ids] * 4, GREEDY, use_tqdm=False)
    cached = blocks_before_the_last_token(length)
    assert [o.num_cached_tokens for o in outputs] == [0, cached, cached, cached]
    assert computed(either) - before == 4 * length - 3 * cached
    for output in outputs:
        assert_result(build, either, ids, GREEDY, output)
    assert_idle(either)


@pytest.mark.parametrize("steps", [2, 3, 5, 20])
def test_a_hit_while_the_producer_runs(steps: int, build: Builder, either: LLM) -> None:
    """While it is prefilled (then the other waits), and while it decodes."""
    set_budget(either, 64)
    ids, params = ids_of(200), replace(GREEDY, max_tokens=40)
    first = either.add_request(ids, params)
    for _ in range(steps):
        step(either)
    assert either.metrics["running"] == 1
    longer = ids + ids_of(5)
    second, third = either.add_request(ids, params), either.add_request(longer, params)
    outputs = drain(either)
    assert outputs[second].num_cached_tokens == outputs[third].num_cached_tokens == 192
    for request_id, prompt in ((first, ids), (second, ids), (third, longer)):
        assert_result(build, either, prompt, params, outputs[request_id])


def test_the_producers_output_is_found_while_it_runs(build: Builder) -> None:
    """Its blocks at once, its state every `snapshot_interval` tokens."""
    llm = build(blocks=40, snapshots=16, interval=64)
    ids, params = ids_of(100), replace(GREEDY, max_tokens=180)
    ((tokens, _, _),) = build.alone(ids, params)
    first = llm.add_request(ids, params)
    for _ in range(170):
        step(llm)
    prompts = [ids + tokens[:n] for n in (29, 93, 95, 150)]
    others = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    outputs = drain(llm)
    for prompt, other in zip(prompts, others, strict=True):
        if build.dtype == "float32":
            cached = blocks_before_the_last_token(len(prompt))
            assert outputs[other].num_cached_tokens == cached >= 128
        assert_result(build, llm, prompt, GREEDY, outputs[other])
    assert_result(build, llm, ids, params, outputs[first])


def test_snapshot_at(build: Builder, llm: LLM) -> None:
    """The caller knows where prompts will part: the second one finds it already."""
    system = ids_of(200)
    first = {"prompt_token_ids": system + ids_of(150, 1), "snapshot_at": [200, 5, 10_000]}
    assert ask(llm, first).num_cached_tokens == 0
    ids = system + ids_of(150, 2)
    output = ask(llm, ids)
    assert output.num_cached_tokens == 192
    assert_result(build, llm, ids, GREEDY, output)


def test_only_equal_salts_share(build: Builder, llm: LLM) -> None:
    ids = ids_of(150)
    for salt in (None, "a", "b", ""):
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        for cached in (0, 128):
            output = ask(llm, prompt)
            assert output.num_cached_tokens == cached, salt
            assert_result(build, llm, ids, GREEDY, output)


def test_a_request_without_the_cache_takes_and_leaves_nothing(build: Builder, llm: LLM) -> None:
    ids = ids_of(150)
    private = {"prompt_token_ids": ids, "prefix_cache": False}
    assert [ask(llm, p).num_cached_tokens for p in (private, private, ids)] == [0, 0, 0]
    assert [ask(llm, p).num_cached_tokens for p in (private, ids)] == [0, 128]
    assert_result(build, llm, ids, GREEDY, ask(llm, private))


def test_prompt_logprobs_run_the_whole_prompt(build: Builder, llm: LLM) -> None:
    """It takes nothing, leaves what others may take, and its chunks give what one run gives."""
    ids, params = ids_of(300), replace(GREEDY, prompt_logprobs=0)
    cold = ask(build.reference, ids, params)
    set_budget(llm, 70)
    for _ in range(2):
        output = ask(llm, ids, params)
        assert output.num_cached_tokens == 0
        assert result(output) == result(cold) or build.dtype != "float32"
        for got, expected, token in zip(
            (output.prompt_logprobs or [])[1:], (cold.prompt_logprobs or [])[1:], ids[1:],
            strict=True,
        ):  # fmt: skip
            assert got is not None and expected is not None
            tolerance = 1e-4 if build.dtype == "float32" else 0.2
            assert got[token].logprob == pytest.approx(expected[token].logprob, abs=tolerance)
    assert ask(llm, ids).num_cached_tokens == 256


def test_reset(build: Builder, llm: LLM) -> None:
    """Nothing is found any more, not even what a request leaves that ran through it."""
    ids, params = ids_of(150), replace(GREEDY, max_tokens=60)
    ask(llm, ids)
    running = llm.add_request(ids, params)
    for _ in range(5):
        step(llm)
    llm.reset_prefix_cache()
    llm.engine.scheduler.check_integrity()
    outputs = drain(llm)
    assert outputs[running].num_cached_tokens == 128
    assert_result(build, llm, ids, params, outputs[running])
    for cached in (0, 128):
        output = ask(llm, ids)
        assert output.num_cached_tokens == cached
        assert_result(build, llm, ids, GREEDY, output)


def churn(llm: LLM, lengths: Sequence[int]) -> None:
    """Other prompts, which take the place of what was kept longest."""
    for seed, length in enumerate(lengths):
        ask(llm, ids_of(length, 50 + seed))


def check_again(build: Builder, llm: LLM, ids: list[int], cached: int) -> dict[str, int]:
    """A prompt comes back; what the cache's counters say of it."""
    before = llm.metrics["prefix_cache"]
    output = ask(llm, ids)
    assert output.num_cached_tokens == cached
    assert_result(build, llm, ids, GREEDY, output)
    assert_idle(llm)
    return {name: value - before[name] for name, value in llm.metrics["prefix_cache"].items()}


def test_the_kv_is_gone_and_the_state_is_kept(build: Builder) -> None:
    llm = build(blocks=8, snapshots=32)
    ids = ids_of(300)
    ask(llm, ids)
    churn(llm, [400, 400])
    counts = check_again(build, llm, ids, cached=0)
    assert counts["kv_matched_tokens"] == 0 and counts["state_matched_tokens"] == 256
    check_again(build, llm, ids, cached=256)


def test_part_of_the_kv_is_gone(build: Builder) -> None:
    """The chain loses its tail first; the one state lies behind it, so nothing is reused."""
    llm = build(blocks=8, snapshots=32)
    ids = ids_of(300)
    ask(llm, ids)
    churn(llm, [300])
    counts = check_again(build, llm, ids, cached=0)
    assert 0 < counts["kv_matched_tokens"] < 256 == counts["state_matched_tokens"]
    check_again(build, llm, ids, cached=256)


def test_the_state_is_gone_and_the_kv_is_kept(build: Builder) -> None:
    llm = build(blocks=64, snapshots=1)
    ids = ids_of(300)
    ask(llm, ids)
    churn(llm, [100])
    counts = check_again(build, llm, ids, cached=0)
    assert counts["kv_matched_tokens"] == 256 and counts["state_matched_tokens"] == 0
    check_again(build, llm, ids, cached=256)


def test_the_state_is_on_the_host(build: Builder) -> None:
    """Spilled, restored from there, and lost once the host is full too."""
    llm = build(blocks=64, snapshots=1, host=2)
    ids = ids_of(300)
    ask(llm, ids)
    churn(llm, [100, 101])
    assert llm.metrics["prefix_cache"]["snapshots_spilled"] == 2
    counts = check_again(build, llm, ids, cached=256)
    assert counts["snapshots_restored"] == 1
    churn(llm, [100, 101, 102, 103])
    counts = check_again(build, llm, ids, cached=0)
    assert counts["kv_matched_tokens"] == 256 and counts["state_matched_tokens"] == 0


@pytest.mark.parametrize("mode", ["eager", "compiled", "reference"])
def test_every_mode(mode: str, build: Builder) -> None:
    """Reference mode keeps no state, so it takes and leaves nothing."""
    llm = build(mode=mode)
    ids = ids_of(150)
    for cached in (0, 0 if mode == "reference" else 128):
        output = ask(llm, ids)
        assert output.num_cached_tokens == cached
        assert_result(build, llm, ids, GREEDY, output)
