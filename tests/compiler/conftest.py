"""Traces and compilations shared by the tests of the compiler: each costs a second or two."""

from __future__ import annotations

import pytest
import torch
from toy_graphs import tiny_config

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.canonicalize import Canonicalize
from minivllm.compiler.trace import trace
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig

BLOCK_SIZE = 16


@pytest.fixture(scope="session")
def config() -> MiniQwenConfig:
    return tiny_config()


@pytest.fixture(scope="session")
def context(config: MiniQwenConfig) -> PassContext:
    return PassContext(config, torch.float32, BLOCK_SIZE)


@pytest.fixture(scope="session")
def source(config: MiniQwenConfig) -> Graph:
    """The tiny config traced in float32; clone it before rewriting."""
    return trace(config, torch.float32)


@pytest.fixture(scope="session")
def half_source(config: MiniQwenConfig) -> Graph:
    """The tiny config traced in bfloat16; clone it before rewriting."""
    return trace(config, torch.bfloat16)


@pytest.fixture(scope="session")
def canonical(source: Graph, context: PassContext) -> Graph:
    """`source` behind canonicalize, which the contract asks for."""
    graph = source.clone("source")
    Canonicalize().run(graph, context)
    return graph


@pytest.fixture(scope="session")
def half_canonical(half_source: Graph, context: PassContext) -> Graph:
    """`half_source` behind canonicalize."""
    graph = half_source.clone("source")
    Canonicalize().run(graph, context)
    return graph


@pytest.fixture(scope="session")
def compiled(config: MiniQwenConfig) -> CompiledModel:
    """The tiny config compiled in float32; not to be changed."""
    return compile_model(config, torch.float32, CompilerOptions(), block_size=BLOCK_SIZE)


@pytest.fixture(scope="session")
def eager(config: MiniQwenConfig) -> CompiledModel:
    """The tiny config in float32 after the mandatory passes; not to be changed."""
    options = CompilerOptions(mode="eager")
    return compile_model(config, torch.float32, options, block_size=BLOCK_SIZE)


@pytest.fixture(scope="session")
def half_compiled(config: MiniQwenConfig) -> CompiledModel:
    """The tiny config compiled in bfloat16; not to be changed."""
    return compile_model(config, torch.bfloat16, CompilerOptions(), block_size=BLOCK_SIZE)
