"""`AsyncLLM`: many askers, who come, leave and fail at any moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import VOCAB, Builder, assert_idle, checkpoint, result
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.errors import UserError
from minivllm.presets import model_preset
from minivllm.runtime.async_llm import AsyncLLM
from minivllm.runtime.outputs import RequestOutput

LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
TIMEOUT = 60


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")))


@pytest.fixture
def llm(build: Builder) -> LLM:
    return build(max_num_seqs=3)


@pytest.fixture
def served(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM over `llm`."""
    server = AsyncLLM.__new__(AsyncLLM)
    server._start(llm)
    yield server
    if server._thread.is_alive():
        server._calls.put(None)
        server._thread.join(TIMEOUT)
    assert not server._thread.is_alive()


def run(main: Any) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, TIMEOUT)

    return asyncio.run(limited())


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


async def final(server: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in server.generate(prompt, params)]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def idle(server: AsyncLLM) -> dict[str, Any]:
    """Wait until nothing runs any more."""
    while True:
        numbers = await server.metrics()
        if not numbers["waiting"] and not numbers["running"]:
            return numbers
        await asyncio.sleep(0.01)


def test_many_askers_get_what_each_would_get_alone(build: Builder, served: AsyncLLM) -> None:
    """Nine of them, of three at most that run at once."""
    asked = [(random_ids(3 + 29 * i, VOCAB, seed=i), greedy(5 + 7 * i)) for i in range(9)]
    asked[4] = asked[4][0], SamplingParams(n=2, seed=5, max_tokens=9, ignore_eos=True)

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(final(served, ids, params) for ids, params in asked))

    outputs = run(main())
    for (ids, params), output in zip(asked, outputs, strict=True):
        assert output.prompt_token_ids == ids
        assert result(output) == build.ends(ids, params)
    assert len({o.request_id for o in outputs}) == 9
    assert_idle(served._llm)


def test_deltas_add_up_and_a_slow_taker_gets_merged_outputs() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    async def main() -> None:
        async with AsyncLLM("tiny", device="cpu", max_model_len=200) as server:
            for pause in (0.0, 0.3):
                outputs = []
                async for output in server.generate("She had", params):
                    outputs.append(output)
                    await asyncio.sleep(pause)
                last = outputs[-1].outputs[0]
                assert "".join(o.outputs[0].delta for o in outputs) == last.text
                assert len(last.token_ids) == 40 and last.text
                lengths = [len(o.outputs[0].token_ids) for o in outputs]
                assert lengths == sorted(set(lengths))
            assert len(outputs) < 40, "40 steps take less than 40 pauses"

    run(main())


def test_leaving_early_frees_everything(served: AsyncLLM) -> None:
    async def main() -> None:
        async for output in served.generate([1, 2, 3], LONG, "early"):
            if len(output.outputs[0].token_ids) > 3:
                break
        # the iterator of a loop that was left ends when it is collected, or closed
        numbers = await idle(served)
        assert numbers["aborted"] == 1 and numbers["generated_tokens"] < 1000

    run(main())
    assert_idle(served._llm)


def test_cancelling_at_any_stage_frees_everything(served: AsyncLLM) -> None:
    """Three run, the others wait; each is cancelled after another time, some before they start."""

    async def main() -> None:
        tasks = [
            asyncio.create_task(final(served, random_ids(200, VOCAB, seed=i), LONG))
            for i in range(12)
        ]
        for i, task in enumerate(tasks):
            await asyncio.sleep(0.004 * (i % 3))
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, asyncio.CancelledError) for e in ended)
        await idle(served)
        # ids are free again, and the engine works
        output = await final(served, [5, 6], greedy(4))
        assert len(output.outputs[0].token_ids) == 4

    run(main())
    assert not served._listeners
    assert_idle(served._llm)


def test_cancelled_while_its_addition_runs(served: AsyncLLM, monkeypatch: Any) -> None:
    """The asker is gone when the engine's thread has added it; nobody else would abort it."""
    adding, go_on = threading.Event(), threading.Event()
    original = served._llm.queue_request

    def slow(*arguments: Any) -> Any:
        adding.set()
        assert go_on.wait(TIMEOUT)
        return original(*arguments)

    monkeypatch.setattr(served._llm, "queue_request", slow)

    async def main() -> None:
        task = asyncio.create_task(final(served, [1, 2, 3], LONG))
        await asyncio.to_thread(adding.wait, TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        numbers = await idle(served)
        assert numbers["aborted"] == 1 and numbers["generated_tokens"] < 50

    run(main())
    assert_idle(served._llm)


def test_abort_by_id(served: AsyncLLM) -> None:
    async def main() -> None:
        async def asked(name: str) -> RequestOutput:
            return [o async for o in served.generate([1, 2, 3], LONG, name)][-1]

        tasks = [asyncio.create_task(asked(name)) for name in "abcde"]  # d and e wait
        while (await served.metrics())["running"] < 3:
            await asyncio.sleep(0.005)
        with pytest.raises(UserError, match=r"request_id='z': no such request; there are: 'a'"):
            await served.abort("z")
        with pytest.raises(UserError, match=r"request_id='a' is in use"):
            await asked("a")
        with pytest.raises(UserError, match=r"request_id=7: must be a text"):
            await asked(7)  # type: ignore[arg-type]
        for name in "aebdc":
            await served.abort(name)
        for task in tasks:
            output = await task
            assert output.finished and output.outputs[0].finish_reason == "abort"
        with pytest.raises(UserError, match="there are: none"):
            await served.abort("a")

    run(main())
    assert_idle(served._llm)


def test_a_late_leave_does_not_hit_the_next_of_that_name(served: AsyncLLM) -> None:
    async def main() -> None:
        first = served.generate([1, 2, 3], LONG, "name")
        await anext(first)
        await served.abort("name")
        await asyncio.sleep(0.05)
        second = asyncio.create_task(final_of("name"))
        await asyncio.sleep(0.01)
        await first.aclose()  # type: ignore[attr-defined]
        assert len((await second).outputs[0].token_ids) == 30

    async def final_of(name: str) -> RequestOutput:
        return [o async for o in served.generate([1, 2, 3], greedy(30), name)][-1]

    run(main())


def test_an_error_in_the_engine_reaches_all_askers(served: AsyncLLM, monkeypatch: Any) -> None:
    runner = served._llm.engine.runner
    original, steps = runner.execute, []

    def failing(step: Any) -> Any:
        steps.append(step)
        if len(steps) == 6:
            raise torch.OutOfMemoryError("no memory")
        return original(step)

    monkeypatch.setattr(runner, "execute", failing)

    async def main() -> None:
        asked = [final(served, [1, 2, i], LONG) for i in range(5)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, RuntimeError)
            assert str(error) == "the engine has stopped after an error"
            assert isinstance(error.__cause__, torch.OutOfMemoryError)
        for late in (final(served, [1], LONG), served.metrics(), served.abort("0")):
            with pytest.raises(RuntimeError, match="stopped after an error"):
                await late
        await served.close()

    run(main())


def test_what_is_handed_in_while_the_thread_ends_is_answered(
    served: AsyncLLM, monkeypatch: Any
) -> None:
    """Between its last look at the calls and its end, the thread must not leave a call behind."""
    entered, go_on = threading.Event(), threading.Event()

    def failing(step: Any) -> Any:
        entered.set()
        assert go_on.wait(TIMEOUT)
        raise RuntimeError("broken")

    monkeypatch.setattr(served._llm.engine.runner, "execute", failing)

    async def main() -> None:
        first = asyncio.create_task(final(served, [1], LONG))
        await asyncio.to_thread(entered.wait, TIMEOUT)
        late = [asyncio.create_task(served.metrics()) for _ in range(5)]
        await asyncio.sleep(0.02)
        late[2].cancel()
        go_on.set()
        ended = await asyncio.gather(first, *late, return_exceptions=True)
        assert [type(e) for e in ended].count(RuntimeError) == 5
        assert isinstance(ended[3], asyncio.CancelledError)

    run(main())


def test_closing_while_requests_run_and_use_after_it(served: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(final(served, [1, 2, i], LONG)) for i in range(5)]
        while not (await served.metrics())["generated_tokens"]:
            await asyncio.sleep(0.005)
        await served.close()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, UserError) and "this AsyncLLM is closed" in str(error)
        await served.close()
        for use in (final(served, [1], LONG), served.abort("0"), served.reset_prefix_cache()):
            with pytest.raises(UserError, match="closed"):
                await use

    run(main())
    with pytest.raises(UserError, match="closed"):
        served._llm.generate([1], greedy(1))


def test_a_bad_prompt_harms_nobody(served: AsyncLLM) -> None:
    async def main() -> None:
        good = asyncio.create_task(final(served, [1, 2, 3], greedy(20)))
        with pytest.raises(UserError, match="it is empty"):
            await final(served, [[]], greedy(1))
        with pytest.raises(UserError, match="give one prompt, not 2"):
            await final(served, [[1], [2]], greedy(1))
        assert len((await good).outputs[0].token_ids) == 20

    run(main())
    assert_idle(served._llm)


def test_the_event_loop_stays_free(served: AsyncLLM, monkeypatch: Any) -> None:
    original = served._llm.engine.runner.execute

    def slow(step: Any) -> Any:
        time.sleep(0.1)
        return original(step)

    monkeypatch.setattr(served._llm.engine.runner, "execute", slow)

    async def main() -> None:
        task = asyncio.create_task(final(served, [1, 2, 3], greedy(5)))
        widest, last = 0.0, time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            widest, last = max(widest, now - last), now
        assert widest < 0.09

    run(main())


def test_from_a_config() -> None:
    async def main() -> None:
        config = EngineConfig(model_preset("tiny"), runtime=RuntimeOptions(device="cpu"))
        async with AsyncLLM.from_config(config) as server:
            output = await final(server, "a", greedy(3))
            assert len(output.outputs[0].token_ids) == 3
            assert (await server.metrics())["finished"] == 1
            await server.reset_prefix_cache()

    run(main())
    with pytest.raises(TypeError, match="no_such"):
        AsyncLLM("tiny", no_such=1)
