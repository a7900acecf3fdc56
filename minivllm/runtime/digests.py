"""Digests: names of prefixes, a block at a time, that only equal prefixes share.

Owns the chain of hashes and how far a request's is known. Does not own what is found by it. No
torch.

    first, second = block_digests(token_ids, 2, salt=None)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from minivllm.runtime.request import Request

BLOCK_SIZE = 64  # tokens in a KV block, and between two places where a state can be kept
DIGEST_SIZE = 32  # 256 bits: nobody finds two prefixes of one digest, so tokens aren't compared


def block_digests(
    token_ids: Sequence[int], count: int, salt: str | None, previous: Sequence[bytes] = ()
) -> list[bytes]:
    """The digests of the blocks behind `previous`, up to block `count`.

    A digest covers all tokens up to its block's end: it is the hash of the digest before it and
    the block's 64 ids, and the first one's parent is the salt's (so that no salt differs from any).
    """
    if previous:
        parent = previous[-1]
    else:
        tagged = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        parent = blake2b(tagged, digest_size=DIGEST_SIZE).digest()
    ids = token_ids[len(previous) * BLOCK_SIZE : count * BLOCK_SIZE]
    packed = struct.pack(f"<{len(ids)}q", *ids)
    found = []
    for at in range(0, len(packed), BLOCK_SIZE * 8):
        tokens = packed[at : at + BLOCK_SIZE * 8]
        parent = blake2b(parent + tokens, digest_size=DIGEST_SIZE).digest()
        found.append(parent)
    return found


def known_digests(request: Request, count: int) -> list[bytes]:
    """The request's chain, extended to `count` blocks at least, which must be full."""
    digests = request.block_digests
    if len(digests) < count:
        digests += block_digests(request.token_ids, count, request.cache.salt, digests)
    return digests
