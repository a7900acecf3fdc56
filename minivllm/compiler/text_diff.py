"""The difference of two listings, quickly: a line that stands once on both sides is an anchor.

Owns the comparison and the unified form. Does not own how a listing is written (listing.py).

    blocks = Diff(before, after).get_opcodes()      # as difflib's
    text = unified(before, after, "00_source.txt", "01_canonicalize.txt")

difflib alone searches all lines for each block it finds, which takes a second for a stage of a
large model. Nearly every line of a listing is unlike all others, so the longest run of anchors
that keeps its order (patience diff) leaves gaps of a few lines, and those are difflib's.
"""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Sequence


class Diff(difflib.SequenceMatcher[str]):
    """difflib's matcher of two lists of lines, with anchors found first."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, before, after, autojunk=False)
        self._sides = before, after

    def get_matching_blocks(self) -> list[difflib.Match]:
        """`(start before, start after, length)` of the lines that stay; the last one is empty."""
        before, after = self._sides
        ends = (len(before), len(after))
        pairs: list[tuple[int, int]] = []
        start = (0, 0)
        for i, j in [*_anchors(before, after), ends]:
            gap = difflib.SequenceMatcher(
                None, before[start[0] : i], after[start[1] : j], autojunk=False
            )
            for block in gap.get_matching_blocks():
                pairs += [
                    (start[0] + block.a + k, start[1] + block.b + k) for k in range(block.size)
                ]
            if (i, j) != ends:
                pairs.append((i, j))
            start = (i + 1, j + 1)
        blocks: list[difflib.Match] = []
        for i, j in pairs:
            last = blocks[-1] if blocks else None
            if last and (last.a + last.size, last.b + last.size) == (i, j):
                blocks[-1] = difflib.Match(last.a, last.b, last.size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
        return [*blocks, difflib.Match(*ends, 0)]


def unified(before: str, after: str, name_before: str, name_after: str) -> str:
    """Two texts' difference as `diff -u` writes it; empty for equal texts."""
    a, b = before.splitlines(), after.splitlines()
    lines = []
    for group in Diff(a, b).get_grouped_opcodes(3):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        lines.append(f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@")
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in a[a1:a2]]
            else:
                lines += [f"-{line}" for line in a[a1:a2]] + [f"+{line}" for line in b[b1:b2]]
    if not lines:
        return ""
    return "\n".join([f"--- {name_before}", f"+++ {name_after}", *lines, ""])


def _range(start: int, stop: int) -> str:
    length = stop - start
    return f"{start + (length > 0)}" if length == 1 else f"{start + (length > 0)},{length}"


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """The longest rising run of lines that stand once on each side, by patience sorting."""
    count_a, count_b = Counter(a), Counter(b)
    place = {line: j for j, line in enumerate(b) if count_b[line] == 1}
    tops: list[int] = []  # of each pile: its place in b
    piles: list[int] = []  # of each pile: the index in `cards` of its top
    cards: list[tuple[int, int, int]] = []  # place in a, place in b, index of the card before it
    for i, line in enumerate(a):
        if count_a[line] == 1 and line in place:
            j = place[line]
            pile = bisect.bisect_left(tops, j)
            cards.append((i, j, piles[pile - 1] if pile else -1))
            tops[pile : pile + 1] = [j]
            piles[pile : pile + 1] = [len(cards) - 1]
    run = []
    index = piles[-1] if piles else -1
    while index >= 0:
        i, j, index = cards[index]
        run.append((i, j))
    return run[::-1]
