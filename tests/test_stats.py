"""The bootstrap: coverage on a known model, scipy's answer in the one-level case, seeding, speed, refusals."""

import time

import numpy as np
import pytest
import scipy.stats

from pa_core import stats


def hierarchical_normal(rng, n_runs, n_tasks, *, run_sd=1.0, task_sd=0.0, noise_sd=1.0):
    """score = run effect + task effect + noise, all centred: the true value of every location estimand is 0."""
    return (
        run_sd * rng.standard_normal((n_runs, 1))
        + task_sd * rng.standard_normal((1, n_tasks))
        + noise_sd * rng.standard_normal((n_runs, n_tasks))
    )


def coverage(rng, n_data, *, model, **options):
    hits = 0
    for _ in range(n_data):
        low, high = stats.location(model(rng), rng=rng, statistic="mean", n_resamples=400, **options).ci
        hits += low <= 0 <= high
    return hits / n_data


def test_coverage_is_95_percent_on_a_known_hierarchical_model():
    # 300 data sets: binomial standard error 1.3 %, so [.90, .99] is about four of them on either side.
    model = lambda rng: hierarchical_normal(rng, 40, 30)
    assert 0.90 <= coverage(np.random.default_rng(1), 300, model=model) <= 0.99


def test_tasks_that_are_hard_for_every_run_need_shared_tasks():
    # With a strong task effect common to all runs, drawing tasks inside each run averages it away and covers too rarely.
    model = lambda rng: hierarchical_normal(rng, 20, 20, run_sd=0.3, task_sd=1.0, noise_sd=0.3)
    nested = coverage(np.random.default_rng(2), 200, model=model)
    shared = coverage(np.random.default_rng(2), 200, model=model, shared_tasks=True)
    assert nested < 0.8 < 0.88 < shared <= 0.99  # four binomial standard errors (1.5 %) around .94


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_one_level_difference_agrees_with_scipy(statistic):
    rng = np.random.default_rng(3)
    x, y = rng.lognormal(size=(2, 64))
    ours = stats.difference(x[None], y, rng=rng, statistic=statistic)
    theirs = scipy.stats.bootstrap((x - y,), getattr(np, statistic), method="percentile", n_resamples=10_000, rng=rng)
    # Both ends are 10,000-draw quantile estimates: standard error .16 % in probability each, so .8 % is about 3.5 of the
    # difference's; compare in probability, so that the median's discrete distribution needs no other tolerance.
    for end, p in zip(ours.ci, (0.025, 0.975), strict=True):
        low, high = np.quantile(theirs.bootstrap_distribution, (p - 0.008, p + 0.008))
        assert low <= end <= high


def test_one_level_ratio_agrees_with_scipys_paired_bootstrap():
    rng = np.random.default_rng(4)
    y = rng.lognormal(size=64)
    x = y * rng.lognormal(sigma=0.3, size=64)
    ours = stats.ratio(x[None], y, rng=rng, statistic="mean")
    theirs = scipy.stats.bootstrap(
        (x, y),
        lambda a, b, axis: a.mean(axis) / b.mean(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=rng,
    )
    for end, p in zip(ours.ci, (0.025, 0.975), strict=True):
        low, high = np.quantile(theirs.bootstrap_distribution, (p - 0.008, p + 0.008))
        assert low <= end <= high
    # Pairing is what makes it narrow: the same scores matched to the wrong tasks give an interval twice as wide or wider.
    unpaired = stats.ratio(rng.permuted(x)[None], y, rng=rng, statistic="mean")
    assert np.ptp(unpaired.ci) > 2 * np.ptp(ours.ci)


def test_values_by_hand():
    scores = np.array([[1.0, 2.0, 6.0], [2.0, 4.0, 3.0], [9.0, 1.0, 5.0]])
    reference = np.array([1.0, 2.0, 4.0])
    rng = np.random.default_rng(0)
    ratio = stats.ratio(scores, reference, rng=rng)
    assert ratio.runs == (1.0, 1.5, 2.5) and ratio.value == 1.5  # medians 2, 3, 5 over the reference's 2
    assert (ratio.n_runs, ratio.n_tasks) == (3, 3)
    difference = stats.difference(scores, reference, rng=rng)
    assert difference.runs == (0.0, 1.0, 1.0) and difference.value == 1.0  # of (0,0,2), (1,2,-1), (8,-1,1)
    means = stats.ratio(scores, reference, rng=rng, statistic="mean")
    assert means.runs == pytest.approx((9 / 7, 9 / 7, 15 / 7), rel=1e-15)
    assert stats.location(scores, rng=rng).runs == (2.0, 3.0, 5.0)


def test_a_reference_for_each_run_is_paired_by_run():
    scores = np.arange(6.0).reshape(2, 3) + 1
    paired = stats.difference(scores, scores, rng=np.random.default_rng(0))
    assert paired.value == 0 and paired.ci == (0.0, 0.0)  # only a pairing by run and task gives an interval of no width
    crossed = stats.difference(scores, scores[::-1], rng=np.random.default_rng(0))
    assert crossed.runs == (-3.0, 3.0)


def test_both_levels_are_resampled():
    rng = np.random.default_rng(5)
    only_runs = np.repeat(rng.standard_normal((8, 1)), 10, axis=1)  # no spread over tasks
    only_tasks = np.repeat(rng.standard_normal((1, 10)), 8, axis=0)  # no spread over runs
    for scores in (only_runs, only_tasks):
        low, high = stats.location(scores, rng=rng, n_resamples=500).ci
        assert low < high
    low, high = stats.location(only_runs, rng=rng).ci
    ends = np.sort(only_runs[:, 0])
    assert low in (ends[:-1] + ends[1:]) / 2 or low in ends  # medians of resampled runs: order statistics or midpoints


def test_same_seed_same_interval_and_the_global_generator_is_untouched():
    scores = np.random.default_rng(6).standard_normal((5, 64))
    np.random.seed(0)
    first = stats.location(scores, rng=np.random.default_rng(7))
    before = np.random.get_state()[1].copy()
    np.random.seed(12345)
    again = stats.location(scores, rng=np.random.default_rng(7))
    other = stats.location(scores, rng=np.random.default_rng(8))
    np.random.seed(0)
    assert first == again and first.ci != other.ci
    assert (np.random.get_state()[1] == before).all()


def test_speed():
    rng = np.random.default_rng(9)
    scores, reference = rng.lognormal(size=(5, 64)), rng.lognormal(size=64)
    best = np.inf
    for _ in range(3):  # the best of three: other processes share the machine
        begin = time.process_time()
        stats.ratio(scores, reference, rng=rng)
        best = min(best, time.process_time() - begin)
    assert best < 2.0


def test_chunks_do_not_bias(monkeypatch):
    scores = np.random.default_rng(10).standard_normal((5, 64))
    whole = stats.location(scores, rng=np.random.default_rng(0))
    monkeypatch.setattr(stats, "CHUNK_ENTRIES", 1000)  # three replicates a chunk
    pieces = stats.location(scores, rng=np.random.default_rng(0))
    width = whole.ci[1] - whole.ci[0]
    assert pieces.ci == pytest.approx(whole.ci, abs=0.1 * width)  # Monte-Carlo error of two ends, about .03 of the width


def test_undefined_replicates_widen_the_interval():
    reference = np.array([[0.0, 0.0, 1.0, 1.0, 1.0]])  # its median is 1, but some replicates have median 0
    low, high = stats.ratio(np.zeros((1, 5)), reference, rng=np.random.default_rng(0)).ci
    assert (low, high) == (-np.inf, np.inf)  # 0 / 0 counts against both ends


def test_formatting_shows_interval_sizes_and_runs():
    estimate = stats.Estimate(1.0523, (0.9, 1.25), (1.0, 1.0523, 1.1), 3, 64, 0.95)
    assert f"{estimate:.2f}" == "1.05 [0.90, 1.25]"
    assert str(estimate) == "1.05 [0.9, 1.25]"
    assert estimate.describe(".2f", task="MDPs") == "1.05 [0.90, 1.25]; 3 runs x 64 MDPs; by run: 1.00 1.05 1.10"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s, r: stats.location(np.where(np.eye(3, 4), np.nan, s), rng=r),
            r"scores must be finite, got nan at run 0, task 0",
        ),
        (
            lambda s, r: stats.difference(s, np.array([1, 2, np.inf, 4]), rng=r),
            r"reference must be finite, got inf at run 0, task 2",
        ),
        (lambda s, r: stats.difference(s, np.ones(3), rng=r), r"reference must have shape \(3, 4\) or \(4,\).*got \(1, 3\)"),
        (lambda s, r: stats.difference(s, np.ones((2, 4)), rng=r), r"got \(2, 4\)"),
        (lambda s, r: stats.location(s[0], rng=r), r"shape \[n_runs, n_tasks\].*got \(4,\)"),
        (lambda s, r: stats.location(s[:, :0], rng=r), r"got \(3, 0\)"),
        (lambda s, r: stats.ratio(s, s * [[1], [0], [1]], rng=r), r"reference is 0 in run 1"),
        (lambda s, r: stats.location(s, rng=r, statistic="mode"), r"statistic must be one of"),
        (lambda s, r: stats.location(s, rng=r, level=1.0), r"level must satisfy"),
        (lambda s, r: stats.location(s, rng=r, n_resamples=0), r"n_resamples must be >= 1"),
        (lambda s, r: stats.bootstrap(lambda x, y: x.mean(-1), s, s[:2], rng=r), r"must have one shape"),
    ],
)
def test_refusals_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((3, 4)), np.random.default_rng(0))


def test_a_seed_is_not_a_generator():
    with pytest.raises(TypeError, match="numpy.random.Generator"):
        stats.location(np.ones((3, 4)), rng=0)
