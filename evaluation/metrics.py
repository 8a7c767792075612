"""Measure how well a reward agrees with labels of states: EPIC distance, AUC, gap; intervals."""

import math
import warnings

import numpy as np


def pearson(x, y):
    """Return the correlation of x [N] and y [N]; NaN if one is constant up to rounding."""
    from scipy import stats  # takes a second

    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if any(np.ptp(values) <= 1e-12 * np.abs(values).max() for values in (x, y)):
        return math.nan
    return float(stats.pearsonr(x, y).statistic)


def epic_distance(x, y):
    """Return the EPIC distance of two rewards that depend on the next state alone (section 4.1 of
    arXiv 2310.12921), from their values x, y [N]: sqrt((1 - rho) / 2); NaN if one is constant.

    No canonical shaping (definition 4.1 of arXiv 2006.13900) is needed: from R(s, a, s') = f(s') it
    only subtracts a constant, E f(S'), and a constant does not change a correlation.
    """
    return math.sqrt((1 - pearson(x, y)) / 2)


def auc(x, good):
    """Return the chance that a state with good [N] true has a higher x [N] than one without (ties
    count half): 1 is perfect, 0.5 chance level, NaN if all states are of one kind."""
    from scipy import stats  # takes a second

    good = np.asarray(good, bool)
    true, false = good.sum(), (~good).sum()
    if not true or not false:
        return math.nan
    ranks = stats.rankdata(x)[good]  # mannwhitneyu's U without its p-value, which takes 0.4 ms
    return float((ranks.sum() - true * (true + 1) / 2) / (true * false))


def gap(x, good):
    """Return how much more reward x [N] good states get than the states that would attract a policy
    instead: the mean of x over good [N] states minus its mean over the highest tenth of the others,
    in standard deviations of x."""
    x, good = np.asarray(x, np.float64), np.asarray(good, bool)
    others = np.sort(x[~good])[::-1]
    if not good.any() or not len(others) or not x.std():
        return math.nan
    return float((x[good].mean() - others[: max(1, len(others) // 10)].mean()) / x.std())


def spearman(x, y):
    """Return the rank correlation of x [N] and y [N]; NaN if one is constant."""
    from scipy import stats  # takes a second

    return pearson(stats.rankdata(x), stats.rankdata(y))


def interval(statistic, x, y, episodes, resamples=2000, seed=0):
    """Return `statistic(x, y)` of values [N] and its 95 % bootstrap interval: (value, low, high),
    NaN where undefined. Resamples in which it is undefined are left out.

    Whole episodes are resampled (`episodes` [N] int is the episode of each state): states of an
    episode are correlated, and resampling single states would make the interval far too narrow.
    """
    from scipy import stats  # takes a second

    value = statistic(x, y)
    numbers, index = np.unique(episodes, return_inverse=True)
    if math.isnan(value) or len(numbers) == 1:
        return value, math.nan, math.nan

    def resampled(drawn):
        times = np.bincount(drawn, minlength=len(numbers))[index]  # draws of each state's episode
        return statistic(np.repeat(x, times), np.repeat(y, times))

    settings = {"vectorized": False, "method": "percentile", "batch": 100, "rng": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of resamples left out
        whole = (np.arange(len(numbers)),)
        drawn = stats.bootstrap(whole, resampled, n_resamples=resamples, **settings)
    low, high = np.nanquantile(drawn.bootstrap_distribution, [0.025, 0.975])
    return value, float(low), float(high)
