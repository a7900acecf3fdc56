"""The measured time of a step, joined to the calls of its graph.

Owns the joining and the sums, on plain lists. Does not own the runs (`runtime/measure.py`) nor how
the numbers look (measured_text.py, report_measured.py).

    timed, notes = join([("%y", "gemm"), ("%z", "norm")], replays)
    step = MeasuredStep(machine, True, calls, timed, step_us, notes)
    step.rows(lambda call: part_of(call.module))

The replay of a captured step shows kernels without the calls that they belong to. Run call by
call, the same graph launches the same kernels, and there each one's call is known; so the two lists
of names are laid side by side, and what does not fit is told, never guessed.

A kernel's time is from the end of all kernels before it to its own end. Kernels may overlap
(programmatic dependent launch), so durations would add up to more than the step; these times add
up to it, the gaps between kernels included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.compiler.cost import Cost
from minivllm.compiler.listing import layer_of

BEFORE, BEHIND = "before the graph", "behind the graph"  # owners beside the calls of a graph
UNJOINED = "not joined"
OWNERS = (BEFORE, BEHIND, UNJOINED)


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy, as a profiler saw it; microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        """When it was done."""
        return self.start + self.duration


@dataclass(frozen=True)
class Timed:
    """A kernel of the step and its time in microseconds.

    Attributes:
        owner: name of the call it belongs to, or one of `OWNERS`.
        name: the kernel's; on a CPU the op's.
    """

    owner: str
    name: str
    us: float


@dataclass(frozen=True)
class Machine:
    """What a device was measured to do: the fastest read or copy, the fastest matrix product."""

    name: str
    bytes_per_second: float
    flops_per_second: float

    def floor_us(self, cost: Cost) -> float:
        """The least time of a call: that of its bytes or of its FLOPs, whichever is longer."""
        return 1e6 * max(cost.bytes / self.bytes_per_second, cost.flops / self.flops_per_second)


@dataclass(frozen=True)
class Call:
    """A call of the graph: its name, module path, op and planned cost."""

    name: str
    module: str
    op: str
    cost: Cost


@dataclass(frozen=True)
class Row:
    """A sum over calls; microseconds. `kernels` ran, `launches` (in the cost) were planned."""

    name: str
    calls: int
    kernels: int
    cost: Cost
    floor_us: float
    us: float


@dataclass(frozen=True)
class MeasuredStep:
    """The planned step of a phase, measured.

    Attributes:
        captured: as one CUDA Graph; otherwise launch by launch.
        calls: of the graph, in program order.
        timed: the kernels in the order they ran.
        step_us: a whole step without a profiler.
        notes: a line for everything that could not be joined.
    """

    machine: Machine
    captured: bool
    calls: tuple[Call, ...]
    timed: tuple[Timed, ...]
    step_us: float
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {call.name for call in self.calls}
        unknown = {t.owner for t in self.timed} - known - set(OWNERS)
        assert not unknown, f"kernels of calls that the graph does not have: {sorted(unknown)}"

    @property
    def total_us(self) -> float:
        """The sum of all times."""
        return sum(t.us for t in self.timed)

    @property
    def floor_us(self) -> float:
        """The sum of the calls' floors."""
        return sum(self.machine.floor_us(call.cost) for call in self.calls)

    def us_of(self) -> dict[str, float]:
        """Owner to the sum of its kernels' times."""
        sums: dict[str, float] = {}
        for timed in self.timed:
            sums[timed.owner] = sums.get(timed.owner, 0.0) + timed.us
        return sums

    def rows(self, key: Callable[[Call], str]) -> list[Row]:
        """Sums of the calls with the same key, in program order; then those of no call."""
        members: dict[str, list[Call]] = {}
        for call in self.calls:
            members.setdefault(key(call), []).append(call)
        us, kernels = self.us_of(), Counter(t.owner for t in self.timed)
        rows = [
            Row(
                name,
                len(calls),
                sum(kernels[c.name] for c in calls),
                sum((c.cost for c in calls), Cost()),
                sum(self.machine.floor_us(c.cost) for c in calls),
                sum(us.get(c.name, 0.0) for c in calls),
            )
            for name, calls in members.items()
        ]
        return rows + [Row(o, 0, kernels[o], Cost(), 0.0, us[o]) for o in OWNERS if o in us]


def part_of(module: str) -> str:
    """The part of the model that a module path belongs to: a layer, or what stands beside them."""
    layer = layer_of(module)
    return module.split(".")[0] if layer is None else f"layers.{layer}"


def split(kernels: Sequence[Kernel], is_marker: Callable[[str], bool]) -> list[list[Kernel]]:
    """The kernels before, between and behind the markers, one list more than there are markers."""
    parts: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if is_marker(kernel.name):
            parts.append([])
        else:
            parts[-1].append(kernel)
    return parts


def gaps_and_times(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """Of each kernel, in the order of their starts: idle time before it, and its own time.

    A kernel's own time is what is left of it when all kernels before it have ended. All of these
    add up to the time from the first start to the last end.
    """
    found = []
    done = kernels[0].start if kernels else 0.0
    for kernel in kernels:
        begin = max(kernel.start, done)
        found.append((begin - done, max(kernel.end - begin, 0.0)))
        done = max(done, kernel.end)
    return found


def middle_means(runs: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each time over the middle half of the runs, by their sums.

    So they add up to the mean of these runs, and a run that was disturbed does not count.
    """
    order = sorted(runs, key=sum)
    middle = order[len(order) // 4 : -(-3 * len(order) // 4)]
    return [sum(of_one) / len(middle) for of_one in zip(*middle, strict=True)]


def align(expected: Sequence[str], observed: Sequence[str]) -> list[int | None]:
    """For each observed name the place of its counterpart; None: it has none, or not surely.

    The two are laid so that as many names as possible fit. Where that can be done in several ways,
    as for one of two equal kernels in a row, none of them is taken.
    """
    if list(expected) == list(observed):
        return list(range(len(observed)))
    first = _longest_fit(expected, observed)
    last = {
        len(observed) - 1 - j: len(expected) - 1 - i
        for j, i in _longest_fit(expected[::-1], observed[::-1]).items()
    }
    return [
        first[j] if j in first and first[j] == last.get(j) else None for j in range(len(observed))
    ]


def _longest_fit(expected: Sequence[str], observed: Sequence[str]) -> dict[int, int]:
    """A longest common subsequence, as early as can be: places in observed to those in expected."""
    rows, columns = len(expected), len(observed)
    longest = [[0] * (columns + 1) for _ in range(rows + 1)]  # of what is left from there on
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            longest[i][j] = (
                longest[i + 1][j + 1] + 1
                if expected[i] == observed[j]
                else max(longest[i + 1][j], longest[i][j + 1])
            )
    found = {}
    i = j = 0
    while i < rows and j < columns:
        if expected[i] == observed[j]:
            found[j] = i
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return found


def join(
    expected: Sequence[tuple[str, str]], replays: Sequence[Sequence[Kernel]]
) -> tuple[tuple[Timed, ...], tuple[str, ...]]:
    """The times of a captured step's kernels, each with the call that it belongs to.

    Args:
        expected: owner and kernel name, in the order in which they run call by call.
        replays: the kernels of each replay, in the order of their starts; at least one.

    Returns:
        The kernels in order, each with its mean over the middle half of the replays, so that they
        add up to the mean of these replays; and a line for everything that did not fit.
    """
    notes = []
    sequences = Counter(tuple(k.name for k in replay) for replay in replays)
    names, count = sequences.most_common(1)[0]
    if count < len(replays):
        notes.append(
            f"{len(replays) - count} of {len(replays)} replays ran other kernels than the rest, "
            "and are left out"
        )
    same = [replay for replay in replays if tuple(k.name for k in replay) == names]
    means = middle_means([[gap + own for gap, own in gaps_and_times(r)] for r in same])
    places = align([name for _, name in expected], names)
    timed = tuple(
        Timed(UNJOINED if place is None else expected[place][0], name, us)
        for name, place, us in zip(names, places, means, strict=True)
    )
    found = set(places)
    missing = [launch for place, launch in enumerate(expected) if place not in found]
    notes += [
        f"{name}, launched by {owner} when run call by call, has no sure place in the step"
        for owner, name in missing
    ]
    notes += [
        f"kernel {number} of the step, {t.name} ({t.us:.1f} µs), belongs to no call with certainty"
        for number, t in enumerate(timed)
        if t.owner == UNJOINED
    ]
    return timed, tuple(notes)
