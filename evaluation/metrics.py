"""How well a reward agrees with what is known of states: EPIC distance, AUC, their intervals."""

import math
import warnings

import numpy as np


def pearson(x, y):
    """Return the correlation of x [N] and y [N], NaN if one is constant up to rounding."""
    from scipy import stats  # takes a second

    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if any(np.ptp(values) <= 1e-12 * np.abs(values).max() for values in (x, y)):
        return math.nan
    return float(stats.pearsonr(x, y).statistic)


def epic_distance(x, y):
    """Return the EPIC distance of two rewards of the next state (section 4.1 of arXiv 2310.12921)
    from their values x, y [N]: sqrt((1 - rho) / 2), NaN if one is constant.

    No canonical shaping is needed (definition 4.1 of arXiv 2006.13900): it takes from
    R(s, a, s') = f(s') only a constant, gamma E f(S'), which correlation does not see.
    """
    return math.sqrt((1 - pearson(x, y)) / 2)


def auc(x, good):
    """Return the chance that a state of which good [N] is true has more x [N] than another (half
    where they are equal): 1 is perfect, 0.5 blind, NaN with a single class."""
    from scipy import stats

    x, good = np.asarray(x), np.asarray(good, bool)
    if good.all() or not good.any():
        return math.nan
    wins = stats.mannwhitneyu(x[good], x[~good], method="asymptotic").statistic
    return float(wins / (good.sum() * (~good).sum()))


def interval(statistic, x, y, episodes, resamples=2000, seed=0):
    """Return `statistic(x, y)` of values [N] and its 95 % bootstrap interval: (value, low, high),
    NaN where undefined. Resamples in which it is undefined are left out.

    Whole episodes (`episodes` [N] int) are resampled: states of one episode are alike, and single
    states would make the interval far too narrow.
    """
    from scipy import stats

    value = statistic(x, y)
    numbers, index = np.unique(episodes, return_inverse=True)
    if math.isnan(value) or len(numbers) == 1:
        return value, math.nan, math.nan

    def resampled(drawn):
        times = np.bincount(drawn, minlength=len(numbers))  # that each episode was drawn
        return statistic(np.repeat(x, times[index]), np.repeat(y, times[index]))

    settings = {"vectorized": False, "method": "percentile", "batch": 100, "rng": seed}
    whole = (np.arange(len(numbers)),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of resamples left out
        drawn = stats.bootstrap(whole, resampled, n_resamples=resamples, **settings)
    low, high = np.nanquantile(drawn.bootstrap_distribution, [0.025, 0.975])
    return value, float(low), float(high)


def epic_interval(x, y, episodes, resamples=2000, seed=0):
    """Return `interval` of `epic_distance(x, y)`."""
    return interval(epic_distance, x, y, episodes, resamples, seed)
