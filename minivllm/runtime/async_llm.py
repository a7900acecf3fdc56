"""`AsyncLLM`: the same engine for many askers at once, in asyncio.

Owns the engine's thread and the way of outputs to whoever awaits them. Does not own the engine.

    async with AsyncLLM("tiny") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].delta, end="")

The engine runs in a thread of its own, so that the event loop stays free; requests and aborts are
handed to it between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from minivllm.config import EngineConfig
from minivllm.errors import UserError
from minivllm.runtime.generation import Generation
from minivllm.runtime.llm import LLM
from minivllm.runtime.outputs import RequestOutput
from minivllm.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Call:
    """Something to do in the engine's thread, between two steps."""

    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except Exception as error:
                self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Listener:
    """Who awaits a request's outputs: the newest one, with all text since the last that was taken.

    Attributes:
        generation: None until the request is added; the engine thread's.
    """

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._item: RequestOutput | BaseException | None = None

    async def take(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        item, self._item = self._item, None
        if isinstance(item, BaseException):
            raise item
        assert item is not None, "an arrival brings something"
        return item

    def deliver(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._put, item)

    def _put(self, item: RequestOutput | BaseException) -> None:
        earlier = self._item
        if isinstance(earlier, RequestOutput) and isinstance(item, RequestOutput):
            outputs = [
                dataclasses.replace(new, delta=old.delta + new.delta)
                for old, new in zip(earlier.outputs, item.outputs, strict=True)
            ]
            item = dataclasses.replace(item, outputs=outputs)
        if not (isinstance(earlier, RequestOutput) and earlier.finished):
            self._item = item
        self._arrived.set()


class AsyncLLM:
    """An `LLM` whose requests come and go while others run.

    Args:
        model, keywords: as for `LLM`.

    Raises:
        UserError, TypeError: as `LLM`.
    """

    def __init__(self, model: str, **keywords: Any) -> None:
        self._start(LLM(model, **keywords))

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """The engine that a whole config describes."""
        llm = cls.__new__(cls)
        llm._start(LLM.from_config(config))
        return llm

    def _start(self, llm: LLM) -> None:
        self._llm = llm
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._listeners: dict[Generation, _Listener] = {}  # the engine thread's
        self._failure: BaseException | None = None
        self._open = True  # whether calls are still answered; changes under the lock
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="minivllm-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding its state whenever it has new tokens.

        Outputs that come faster than they are taken are merged: a state holds all tokens so far.
        Leaving the iteration early, or cancelling the task, aborts the request.

        Args:
            prompt: one, in any form that `LLM.generate` takes.
            sampling_params: None: `SamplingParams()`.
            request_id: unique among running requests, to `abort` it by; None: counts from "0".

        Raises:
            UserError: a prompt that cannot run, an id in use, or `close` was called.
            RuntimeError: the engine's thread has failed; the cause is attached.
        """
        listener = _Listener()
        finished = False
        try:
            await self._call(lambda: self._add(prompt, sampling_params, request_id, listener))
            while not finished:
                output = await listener.take()
                finished = output.finished
                yield output
        finally:
            if not finished:  # it runs after the addition, even where nobody waited for that
                self._put(_Call(lambda: self._leave(listener), Future()))

    async def abort(self, request_id: str) -> None:
        """End a request at any stage; its iteration gets a last output, "abort".

        Raises:
            UserError: there is no such request.
        """
        await self._call(lambda: self._llm.engine.abort(request_id))

    async def metrics(self) -> dict[str, Any]:
        """The engine's counters and times, as plain numbers."""
        return await self._call(lambda: self._llm.metrics)

    async def reset_prefix_cache(self) -> None:
        """Forget everything that is kept for later prompts; running requests go on."""
        await self._call(self._llm.reset_prefix_cache)

    async def close(self) -> None:
        """Abort what runs, stop the thread and free the model's memory.

        Whoever still awaits outputs gets the error that the engine is closed.
        """
        self._put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._llm.close()

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between two steps."""
        call = _Call(function, Future())
        if not self._put(call):
            raise self._gone()
        return await asyncio.wrap_future(call.future)

    def _put(self, call: _Call | None) -> bool:
        """Hand something to the engine's thread; False: it has stopped, and answers nothing."""
        with self._lock:
            if self._open:
                self._calls.put(call)
            return self._open

    # the engine's thread

    def _serve(self) -> None:
        try:
            while self._take_calls():
                if self._llm.engine.has_unfinished:
                    for generation in self._llm.engine.step():
                        self._tell(generation)
        except BaseException as error:
            self._failure = error
        with self._lock:
            self._open = False
        for listener in self._listeners.values():
            listener.deliver(self._gone())
        while not self._calls.empty():  # what was handed in too late
            call = self._calls.get()
            if call is not None:
                call.refuse(self._gone())

    def _take_calls(self) -> bool:
        """Run what was handed in, waiting for it if there is nothing else to do; False: stop."""
        idle = not self._llm.engine.has_unfinished
        while True:
            try:
                call = self._calls.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call.run()
            idle = idle and not self._llm.engine.has_unfinished

    def _tell(self, generation: Generation) -> None:
        listener = self._listeners.get(generation)
        if listener is not None:
            if generation.finished:
                del self._listeners[generation]
            listener.deliver(generation.output())

    def _add(
        self,
        prompt: Any,
        params: SamplingParams | None,
        request_id: str | None,
        listener: _Listener,
    ) -> None:
        listener.generation = self._llm.queue_request(prompt, params, request_id)
        self._listeners[listener.generation] = listener

    def _leave(self, listener: _Listener) -> None:
        generation = listener.generation  # None: the addition failed
        if generation is not None and generation in self._listeners:
            del self._listeners[generation]
            if not generation.finished:
                self._llm.engine.abort(generation.request_id)

    def _gone(self) -> BaseException:
        if self._failure is None:
            return UserError("this AsyncLLM is closed; make another one")
        error = RuntimeError("the engine has stopped after an error")
        error.__cause__ = self._failure
        return error
