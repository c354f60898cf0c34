"""Quantiles of the normal distribution, as keys hold them."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np


def deviations(share: float) -> float:
    """Return how many standard deviations above the mean a share of normal numbers ends, in single
    precision: sqrt(2) erfinv(2 share - 1), rounded as the reference does; minus infinity for 0.
    """
    centered = np.float32(2) * np.float32(share) - np.float32(1)
    if centered <= -1:
        return float("-inf")
    exact = NormalDist().inv_cdf((float(centered) + 1) / 2)
    return float(np.float32(exact / math.sqrt(2)) * np.float32(math.sqrt(2)))
