"""Statistics of measured times, and of the gaps in a stream of tokens. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev


@dataclass(frozen=True)
class Summary:
    """Of one series, in its unit."""

    n: int
    mean: float
    p50: float
    p99: float
    worst: float
    sd: float


def summary(values: Sequence[float]) -> Summary:
    """Mean, percentiles, largest value and standard deviation.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    return Summary(
        len(values), fmean(values), percentile(values, 50), percentile(values, 99), max(values), pstdev(values)
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


@dataclass(frozen=True)
class Gap:
    """Between two arrivals, in seconds."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """Seconds."""
        return self.stop - self.start

    def touches(self, window: tuple[float, float]) -> bool:
        """Whether any of it lies in the window."""
        return self.start < window[1] and self.stop > window[0]


def gaps(times: Iterable[float]) -> Iterator[Gap]:
    """The gaps between arrivals, which must be in order."""
    return (Gap(start, stop) for start, stop in pairwise(times))


def worst_gap(times: Iterable[float], window: tuple[float, float] | None = None) -> float | None:
    """Seconds of the longest gap that touches the window; None if none does."""
    return max((gap.length for gap in gaps(times) if window is None or gap.touches(window)), default=None)


def worst_gap_outside(times: Iterable[float], window: tuple[float, float]) -> float | None:
    """Seconds of the longest gap that does not touch the window; None if there is none."""
    return max((gap.length for gap in gaps(times) if not gap.touches(window)), default=None)


def median_gap(times: Iterable[float], since: float = -math.inf, until: float = math.inf) -> float | None:
    """Seconds of the median gap that lies wholly between the two times; None if none does."""
    lengths = [gap.length for gap in gaps(times) if gap.start >= since and gap.stop <= until]
    return percentile(lengths, 50) if lengths else None
