"""The errors that a user can cause.

Owns the one class that entry points print as a plain message (exit code 2) instead of a traceback.
Does not own faults of the program: those are assertions and ordinary exceptions, and keep theirs.

    raise UserError(f"runtime.device: {value!r} is not one of: auto, cpu, cuda, cuda:N")
"""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input of a user; the message names the value and the choices or ways out."""
