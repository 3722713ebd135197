"""From measured steps to costs: non-negative least squares on relative errors. Numbers only, no device.

A curve through knots is a sum of its first value and the slopes of its stretches, so a fit with no negative part is one
in which more rows never cost less, and whatever was not measured apart stays a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nanoserve.simulate.costs import Costs, Curve, Work

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was measured: its forwards, and seconds without the event loop's part."""

    works: tuple[Work, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`errors` are (predicted - measured) / measured of each sample."""

    body: Curve
    head: Curve
    decode_context: float
    chunk_context: float
    errors: tuple[float, ...]


def fit_costs(samples: Sequence[Sample], *, body_rows: Sequence[int], head_rows: Sequence[int]) -> Fit:
    """Curves with knots at `body_rows` and `head_rows`, both ascending; every sample weighs the same in per cent."""
    features = np.array([_features(sample, body_rows, head_rows) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    solution = non_negative_least_squares(features / seconds[:, None], np.ones(len(samples)))
    errors = features @ solution / seconds - 1
    bodies = len(body_rows)
    return Fit(
        body=_curve(body_rows, solution[:bodies]),
        head=_curve(head_rows, solution[bodies:-2]),
        decode_context=float(solution[-2]),
        chunk_context=float(solution[-1]),
        errors=tuple(float(error) for error in errors),
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A step beside the event loop: `seconds` of it, where its forwards alone take `compute`. It chose `tokens` tokens,
    `requests` of them a request's first."""

    tokens: float
    requests: float
    compute: float
    seconds: float


def fit_host(costs: Costs, served: Sequence[Served]) -> Costs:
    """`costs` with host_step, host_row, host_request and host_share, none negative: the closest to what the steps take
    beyond their forwards, each miss measured as a share of the step."""
    seconds = np.array([step.seconds for step in served])
    features = np.array([[1.0, step.tokens, step.requests, step.compute] for step in served]) / seconds[:, None]
    beyond = np.array([step.seconds - step.compute for step in served])
    step, row, request, share = map(float, non_negative_least_squares(features, beyond / seconds))
    return replace(costs, host_step=step, host_row=row, host_request=request, host_share=share)


def non_negative_least_squares(matrix: Matrix, target: Matrix) -> Matrix:
    """x >= 0 with the least |matrix x - target|: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    Columns are scaled to one length first, so that seconds per row and per position are compared alike."""
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    count = scaled.shape[1]
    solution = np.zeros(count)
    active = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ solution)
        candidates = np.where(active | (lengths == 0), -np.inf, gradient)
        best = int(candidates.argmax())
        if candidates[best] <= 1e-10:
            break
        active[best] = True
        while True:
            trial = np.zeros(count)
            trial[active] = np.linalg.lstsq(scaled[:, active], target, rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                break
            step = (solution[negative] / (solution[negative] - trial[negative])).min()
            solution = solution + step * (trial - solution)
            active &= solution > 1e-12
            solution[~active] = 0.0
        solution = trial
    return np.asarray(solution / np.where(lengths > 0, lengths, 1.0))


def _features(sample: Sample, body_rows: Sequence[int], head_rows: Sequence[int]) -> list[float]:
    """What the unknowns are multiplied by, added up over the forwards."""
    totals = [0.0] * (len(body_rows) + len(head_rows) + 2)
    for work in sample.works:
        parts = [*_stretches(work.rows, body_rows), *_stretches(work.logit_rows, head_rows)]
        for index, value in enumerate([*parts, work.decode_context, work.chunk_context]):
            totals[index] += value
    return totals


def _stretches(rows: int, knots: Sequence[int]) -> list[float]:
    """1 for the first knot's value, then the rows within each stretch between knots, the last going on without end."""
    if not rows:
        return [0.0] * len(knots)
    parts = [1.0]
    for index, low in enumerate(knots[:-1]):
        high = knots[index + 1] if index + 2 < len(knots) else rows
        parts.append(float(max(0, min(rows, high) - low)))
    return parts


def _curve(knots: Sequence[int], parts: Matrix) -> Curve:
    seconds = float(parts[0])
    found = [(knots[0], seconds)]
    for index in range(1, len(knots)):
        seconds += float(parts[index]) * (knots[index] - knots[index - 1])
        found.append((knots[index], seconds))
    return Curve(tuple(found))
