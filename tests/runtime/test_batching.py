"""A request alone is the same request in any batch: joins, leaves, aborts, preemption, forks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engines import (
    KINDS,
    VOCAB,
    Builder,
    assert_idle,
    assert_result,
    checkpoint,
    drain,
    near_tie,
    step,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.runtime.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.1, seed=7, ignore_eos=True)
SYSTEM = random_ids(128, VOCAB, seed=1000)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, VOCAB, seed=length + 5000 * seed)


# Lengths at and around block edges, outputs that cross them, prompts that begin alike.
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (prompt(1), replace(GREEDY, max_tokens=40)),
    (prompt(5), replace(GREEDY, max_tokens=70)),
    (prompt(63), replace(GREEDY, max_tokens=10)),
    (prompt(64), replace(GREEDY, max_tokens=9)),
    (prompt(65), replace(GREEDY, max_tokens=30)),
    (prompt(60), replace(GREEDY, max_tokens=12)),
    (prompt(62), replace(DRAWN, max_tokens=9)),
    (SYSTEM + prompt(58), replace(GREEDY, max_tokens=10)),
    (prompt(130), replace(GREEDY, max_tokens=1)),
    (prompt(200), replace(GREEDY, max_tokens=3)),
    (SYSTEM, replace(GREEDY, max_tokens=66)),
    (SYSTEM + prompt(30), replace(GREEDY, max_tokens=20)),
    (SYSTEM + prompt(7), replace(GREEDY, max_tokens=20)),
    (SYSTEM + prompt(70), replace(DRAWN, max_tokens=12)),
    (prompt(90), replace(DRAWN, max_tokens=40, top_p=0.9, top_k=40)),
    (prompt(50), replace(DRAWN, max_tokens=25, repetition_penalty=1.3, presence_penalty=0.5)),
    (prompt(57), replace(DRAWN, max_tokens=15, n=3)),
    (prompt(64, 1), replace(DRAWN, max_tokens=20, n=2)),
    (SYSTEM + prompt(1), replace(DRAWN, max_tokens=25, n=2, frequency_penalty=0.4)),
    (prompt(11), replace(DRAWN, max_tokens=30, stop_token_ids=tuple(range(8)))),
    (prompt(33), replace(GREEDY, max_tokens=8, n=2, seed=3)),
]
ALL = range(len(REQUESTS))
BFLOAT16 = pytest.param(("cpu", "bfloat16"), id="cpu-bfloat16")


@pytest.fixture(
    scope="module",
    params=[*KINDS, BFLOAT16],
)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")), *request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["in_step", "one_ahead"])
def short_of_memory(request: pytest.FixtureRequest, build: Builder) -> LLM:
    """Memory for two or three of `REQUESTS`."""
    return build(
        blocks=6, snapshots=4, host=2, interval=64, max_num_seqs=5, max_num_batched_tokens=96,
        async_scheduling=request.param,
    )  # fmt: skip


def check(build: Builder, llm: LLM, which: int, output: RequestOutput) -> None:
    ids, params = REQUESTS[which]
    assert_result(build, llm, ids, params, output)


def test_the_requests_tell_things_apart(build: Builder) -> None:
    """Or equal outputs would prove little: these differ, and each varies in itself."""
    tokens = [build.alone(ids, replace(params, n=1))[0].tokens for ids, params in REQUESTS]
    assert len({tuple(t[:8]) for t in tokens if len(t) >= 8}) >= len(tokens) - 4
    assert all(len(set(t)) > len(t) // 3 for t in tokens)


@pytest.mark.parametrize("mode", ["eager", "compiled", "reference"])
def test_all_at_once(mode: str, build: Builder) -> None:
    llm = build(mode=mode, blocks=80, max_num_seqs=32)
    chosen = [3, 4, 8, 9, 12, 13, 16] if mode == "reference" else list(ALL)
    prompts, params = zip(*(REQUESTS[i] for i in chosen), strict=True)
    for which, output in zip(
        chosen, llm.generate(list(prompts), list(params), use_tqdm=False), strict=True
    ):
        check(build, llm, which, output)
    assert_idle(llm)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(ALL)),
        st.tuples(st.just("add"), st.sampled_from(ALL)),
        st.tuples(st.just("step"), st.integers(1, 20)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    min_size=8,
    max_size=20,
)


def play(build: Builder, llm: LLM, actions: list[tuple[str, int]]) -> None:
    """Requests come and go between steps; each ends once, as it does alone."""
    which: dict[str, int] = {}
    outputs = {}
    running: list[str] = []

    def run_step() -> None:
        for output in step(llm):
            if output.finished:
                assert output.request_id not in outputs, "told twice"
                outputs[output.request_id] = output
                if output.request_id in running:
                    running.remove(output.request_id)

    for action, value in actions:
        if action == "add":
            ids, params = REQUESTS[value]
            request_id = llm.add_request(ids, params)
            which[request_id] = value
            running.append(request_id)
        elif action == "abort" and running:
            llm.abort(running.pop(value % len(running)))
            llm.engine.scheduler.check_integrity()
        elif action == "step":
            for _ in range(value):
                if llm.has_unfinished_requests:
                    run_step()
    while llm.has_unfinished_requests:
        run_step()
    assert outputs.keys() == which.keys()
    for request_id, output in outputs.items():
        check(build, llm, which[request_id], output)
    assert_idle(llm)


def test_any_order_of_joins_leaves_and_aborts(build: Builder, short_of_memory: LLM) -> None:
    llm = short_of_memory

    @settings(
        max_examples=20 if build.dtype == "float32" else 6,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(ACTIONS)
    def run(actions: list[tuple[str, int]]) -> None:
        llm.reset_prefix_cache()
        play(build, llm, actions)

    run()
    numbers = llm.metrics
    cache = numbers["prefix_cache"]
    seen = [numbers[name] for name in ("preemptions", "aborted", "finished")]
    seen += [cache[f"snapshots_{name}"] for name in ("restored", "spilled", "dropped")]
    assert min(*seen, cache["blocks_evicted"]) >= 1, numbers


def test_a_crowd(build: Builder, short_of_memory: LLM) -> None:
    """Each request twice, all in one go, through memory for a few."""
    before = short_of_memory.metrics["preemptions"]
    which = [*ALL, *ALL]
    random.Random(0).shuffle(which)
    play(build, short_of_memory, [("add", i) for i in which])
    assert short_of_memory.metrics["preemptions"] >= before + 2


def test_completions_are_requests_with_seeds_of_their_own(build: Builder) -> None:
    """`n` completions with seed s: n requests with seeds s to s + n - 1, in one batch."""
    llm = build(blocks=40, max_num_seqs=12)
    ids = prompt(70)
    params = replace(DRAWN, max_tokens=20, seed=100)
    (group,) = llm.generate(ids, replace(params, n=4), use_tqdm=False)
    apart = llm.generate(
        [ids] * 4, [replace(params, seed=100 + i) for i in range(4)], use_tqdm=False
    )
    tokens = [c.token_ids for c in group.outputs]
    assert len(set(map(tuple, tokens))) == 4
    if build.dtype == "float32":
        assert tokens == [o.outputs[0].token_ids for o in apart]
        assert_result(build, llm, ids, replace(params, n=4), group)
    else:  # the first tokens are of the same logits, in the group and apart
        assert [t[0] for t in tokens] == [c.token_ids[0] for c in group.outputs]
    assert [c.index for c in group.outputs] == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 20, 60])
def test_a_group_is_aborted_at_any_stage(after: int, ahead: bool, build: Builder) -> None:
    """Waiting, in the middle of its prefill, and forked; beside it one that goes on."""
    llm = build(blocks=20, max_num_seqs=5, max_num_batched_tokens=64, async_scheduling=ahead)
    ids, params = SYSTEM + prompt(20), replace(GREEDY, n=3, seed=1, max_tokens=70)
    beside = llm.add_request(prompt(70), replace(GREEDY, max_tokens=80))
    group = llm.add_request(ids, params)
    for _ in range(after):
        step(llm)
    llm.abort(group)
    outputs = drain(llm)
    assert_result(build, llm, ids, params, outputs[group])
    assert {c.finish_reason for c in outputs[group].outputs} == {"abort"}
    assert_result(build, llm, prompt(70), replace(GREEDY, max_tokens=80), outputs[beside])
    assert_idle(llm)


def test_the_youngest_gives_way(build: Builder) -> None:
    """Two that cannot both grow: the younger one is computed again, and only it."""
    llm = build(blocks=5, max_num_seqs=2, snapshots=0)
    params = replace(GREEDY, max_tokens=120)
    first = llm.add_request(prompt(60), params)
    second = llm.add_request(prompt(62), params)
    outputs = drain(llm)
    assert outputs[first].metrics.num_preemptions == 0
    assert outputs[second].metrics.num_preemptions >= 1
    assert llm.metrics["preemptions"] == outputs[second].metrics.num_preemptions
    assert_result(build, llm, prompt(60), params, outputs[first])
    assert_result(build, llm, prompt(62), params, outputs[second])
    assert_idle(llm)


@pytest.mark.parametrize("build", [BFLOAT16], indirect=True)
def test_a_wrong_token_is_no_near_tie(build: Builder) -> None:
    """The measure that bfloat16 is held to tells rounding from a fault."""
    ids, params = prompt(65), replace(GREEDY, max_tokens=12)
    ((tokens, _, _),) = build.alone(ids, params)
    assert near_tie(build, ids, tokens, tokens) == 0
    others = [[*tokens[:8], (tokens[8] + i) % VOCAB, *tokens[9:]] for i in range(1, 20)]
    found = [near_tie(build, ids, other, tokens) for other in others]
    assert sum(width > 2 for width in found) >= 15, found
