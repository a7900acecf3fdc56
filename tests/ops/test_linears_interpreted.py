"""Runs the Triton kernels of linears in the interpreter."""

from __future__ import annotations

from interpreter import run_interpreted


def test_in_the_interpreter() -> None:
    run_interpreted("interpreted_linears.py")
