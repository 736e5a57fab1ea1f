"""An interval for a mean relative error, from stratified samples of few queries.

A few queries have many times the mean error. A sample that misses them has a small mean and a small variance, so the
normal interval covers too seldom. Corrections restore coverage (`experiments/value_aware/spot_check_coverage.py`):

* Student's t, with few degrees of freedom where one group has most of the variance (Welch 1947, Biometrika 34).
* The upper end on the scale of the logarithm (delta method), `mean exp(t s / mean)`, moved up by `A (2 t^2 + 1) s / 6`
  for the estimate's skewness A (Johnson 1978, J. Am. Stat. Assoc. 73). The lower end is `mean - t s`, at least zero.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from fewkeys.guard.sample import Estimates

LARGEST = 700.0
"""exp of larger numbers would overflow float64."""
ANGLES = np.linspace(0.0, np.pi / 2, 2**14 + 1)


def pool(parts: Sequence[Estimates], confidence: float) -> tuple[float, float, float]:
    """The mean error over the queries of all populations, and the ends of its interval.

    With shares `w_p` of the queries: `mean = sum_p w_p mean_p`, `s^2 = sum_pg w_p^2 v_pg`, Welch's degrees of freedom
    `s^4 / (sum_pg (w_p^2 v_pg)^2 / (f_g + 2)) - 2`, and the skewness `A = sum_p w_p^3 third_p / s^3`, at least 0. The
    samples must be independent. Without queries: zeros. Where an error is not finite, all three are the mean.
    """
    total = sum(float(part.count.sum()) for part in parts)
    mean = square = cube = quartic = 0.0
    for part in parts:
        weight = part.count / max(total, 1.0)
        variance = weight.square().unsqueeze(-1) * part.variance
        mean += float((weight * part.mean).sum())
        square += float(variance.sum())
        cube += float((weight**3 * part.third).sum())
        quartic += float((variance.square() / (part.freedom + 2)).sum())
    if not math.isfinite(mean) or square == 0.0:
        return mean, mean, mean
    deviation = math.sqrt(square)
    t = student(confidence, max(1.0, square**2 / quartic - 2))
    skewness = max(0.0, cube / deviation**3)
    high = mean * math.exp(min(t * deviation / mean, LARGEST)) + skewness * (2 * t * t + 1) / 6 * deviation
    return mean, max(0.0, mean - t * deviation), high


def student(confidence: float, freedom: float) -> float:
    """The t with `P(|T| <= t) = confidence` for Student's T with real `freedom` >= 1 degrees. Relative error 1e-6.

    The density of `T = sqrt(f) tan(a)` in the angle a is `cos(a)^(f - 1)`, integrated numerically. From 200 degrees on,
    two terms of Fisher's expansion around the normal quantile are closer.
    """
    if freedom >= 200:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    density = np.cos(ANGLES) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(confidence * area[-1], area, ANGLES)))
