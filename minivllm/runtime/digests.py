"""Digests: names of prefixes, a block at a time, that only equal prefixes share.

Owns the chain of hashes and how far a request's is known. Does not own what is found by it. No
torch.

    first, second = block_digests(token_ids, 2, salt=None)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from minivllm.runtime.request import Request, packed

BLOCK_SIZE = 64  # tokens in a KV block, and between two places where a state can be kept


def block_digests(
    token_ids: Sequence[int], count: int, salt: str | None, previous: Sequence[bytes] = ()
) -> list[bytes]:
    """The digests of the blocks behind `previous`, up to block `count`.

    A digest covers all tokens up to its block's end: it is the hash of the digest before it and
    the block's 64 ids, and the first one's parent is the salt's (so that no salt differs from any).
    Of 256 bits nobody finds two prefixes of one digest, so tokens are not compared.
    """
    if previous:
        parent = previous[-1]
    else:
        tagged = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        parent = sha256(tagged).digest()
    tokens = packed(token_ids, len(previous) * BLOCK_SIZE, count * BLOCK_SIZE)
    found = []
    for at in range(0, len(tokens), BLOCK_SIZE * 8):
        parent = sha256(parent + tokens[at : at + BLOCK_SIZE * 8]).digest()
        found.append(parent)
    return found


def known_digests(request: Request, count: int) -> list[bytes]:
    """The request's chain, extended to `count` blocks at least, which must be full."""
    digests = request.block_digests
    if len(digests) < count:
        digests += block_digests(request.pack(), count, request.cache.salt, digests)
    return digests
