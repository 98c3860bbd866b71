"""Tokens: the slices tile the row, values stand where they should, and transitions mean what they say."""

import numpy as np
import pytest
import torch

from pa_core import tokens as tk
from pa_core.families import dirichlet_log_policies, random_mdps
from pa_core.mdp import MDP, backup

LAYOUT = tk.TokenLayout(4, 3)


@pytest.fixture
def mdp():
    return random_mdps(5, 4, 3, gamma=0.9, rng=np.random.default_rng(0))


@pytest.fixture
def log_pi():
    return dirichlet_log_policies(5, 4, 3, np.random.default_rng(1))


@pytest.mark.parametrize(("C", "A"), [(1, 1), (4, 3), (8, 3), (501, 6)])
def test_slices_tile_the_row(C, A):
    layout = tk.TokenLayout(C, A)
    columns = [c for s in layout.slices.values() for c in range(s.start, s.stop)]
    assert columns == list(range(layout.width)) and layout.width == 2 * C + 2 * A + 9
    assert list(layout.slices) == "kind s a s_next a_next log_pi adv Q eta r".split()
    assert [layout.column(kind) for kind in tk.KINDS] == [0, 1, 2, 3]


def test_wide_slots_have_no_column_and_sizes_are_checked():
    with pytest.raises(KeyError, match="s is 4 columns wide"):
        LAYOUT.column("s")
    with pytest.raises(ValueError, match="n_actions must be >= 1"):
        tk.TokenLayout(4, 0)


def test_a_round_in_causal_order(mdp, log_pi):
    Q = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eta = torch.linspace(0.1, 1, 5, dtype=torch.float64)
    drawn = tk.sample_transitions(mdp, log_pi, 2, np.random.default_rng(2))
    tokens = tk.round_tokens(LAYOUT, log_pi, Q, eta=eta, transitions=drawn)
    kinds = tokens[0, :, LAYOUT.slices["kind"]]
    assert (kinds.sum(-1) == 1).all()
    assert kinds.argmax(-1).tolist() == [0] * 12 + [1] * 4 + [2] * 24 + [3] * 12
    memory, queries, moves, asked = tokens.split([12, 4, 24, 12], 1)
    read = lambda part, name: part[..., LAYOUT.slices[name]]
    for name, value in (("log_pi", log_pi), ("Q", Q), ("adv", Q - Q.amax(-1, keepdim=True))):
        assert torch.equal(read(memory, name)[..., 0], value.flatten(-2))
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(3))
    for part in (memory, asked):
        assert torch.equal(read(part, "s").argmax(-1), pairs[:, 0].expand(5, 12))
        assert torch.equal(read(part, "a").argmax(-1), pairs[:, 1].expand(5, 12))
    assert torch.equal(read(queries, "s"), torch.eye(4, dtype=torch.float64).expand(5, 4, 4))
    assert torch.equal(read(queries, "eta")[..., 0], eta[:, None].expand(5, 4))
    for name in ("s", "a", "s_next", "a_next"):
        assert torch.equal(read(moves, name).argmax(-1), getattr(drawn, name))
    assert torch.equal(read(moves, "r")[..., 0], mdp.R.flatten(-2).repeat_interleave(2, -1))
    assert (read(moves, "log_pi") == 0).all() and (read(asked, "log_pi") == 0).all()
    assert torch.equal(tk.round_tokens(LAYOUT, log_pi, Q, eta=eta), tokens[:, :16])  # the actor's context is a prefix


def test_codes_replace_one_hots(mdp, log_pi):
    layout, generator = tk.TokenLayout(6, 3), torch.Generator().manual_seed(0)
    codes = torch.randn(5, 4, 6, dtype=torch.float64, generator=generator)
    drawn = tk.sample_transitions(mdp, log_pi, 1, np.random.default_rng(2))
    moves = tk.transition_tokens(layout, mdp.R, drawn, codes=codes)
    memory = tk.memory_tokens(layout, mdp.R, Q=mdp.R, codes=codes)
    assert moves.shape == memory.shape == (5, 12, layout.width)
    assert torch.equal(memory[2, 7, layout.slices["s"]], codes[2, 2])  # pair 7 is state 2, action 1
    assert torch.equal(moves[3, 5, layout.slices["s_next"]], codes[3, drawn.s_next[3, 5]])


def test_gauge_ignores_a_shift_of_each_state():
    Q = torch.tensor([[1.0, 3.0, 3.0], [-5.0, -5.0, -5.0]])
    shifted = Q + torch.tensor([[10.0], [-7.0]])
    assert torch.equal(tk.gauge_fixed(Q), torch.tensor([[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert torch.equal(tk.gauge_fixed(shifted), tk.gauge_fixed(Q))


def test_draws_follow_the_kernel_and_the_policy():
    rng = np.random.default_rng(3)
    mdp = random_mdps(1, 3, 2, gamma=0.9, rng=rng)[0]
    log_pi = dirichlet_log_policies(1, 3, 2, rng)[0]
    m = 20_000
    drawn = tk.sample_transitions(mdp, log_pi, m, rng)
    where = (drawn.s, drawn.a, drawn.s_next, drawn.a_next)
    joint = torch.zeros(3, 2, 3, 2).index_put(where, torch.tensor(1 / m), accumulate=True)
    expected = mdp.P[..., None] * log_pi.exp()
    # 36 frequencies of 20,000 draws: a standard deviation is at most .0036, five of them .018
    assert (joint - expected).abs().max() < 0.018
    assert torch.equal(drawn.r, mdp.R[drawn.s, drawn.a])


def test_impossible_outcomes_are_never_drawn():
    P = torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]] * 3, dtype=torch.float64)
    mdp = MDP(P, torch.zeros(3, 2), 0.9)
    log_pi = torch.tensor([[0.0, -800.0]] * 3, dtype=torch.float64)  # exp(-800) is exactly 0
    drawn = tk.sample_transitions(mdp, log_pi, 5000, np.random.default_rng(4))
    assert (mdp.P[drawn.s, drawn.a, drawn.s_next] > 0).all() and (drawn.a_next == 0).all()
    for row in ([0.3, 0.7, 0.0], [0.1] * 10 + [0.0], [1 / 3] * 3 + [0.0]):  # totals of 1 and of 1 - 1e-16
        row = torch.tensor(row, dtype=torch.float64)
        top = tk._inverse_cdf(row, torch.tensor([np.nextafter(1.0, 0.0)]))
        assert row[top] > 0  # the largest u that a generator gives still hits an outcome with weight


def test_draws_depend_on_the_generator_alone(mdp, log_pi):
    draw = lambda seed: tk.sample_transitions(mdp, log_pi, 3, np.random.default_rng(seed))
    torch.manual_seed(0)
    first = draw(7)
    torch.manual_seed(1)
    assert torch.equal(first.s_next, draw(7).s_next) and torch.equal(first.a_next, draw(7).a_next)
    assert not torch.equal(first.s_next, draw(8).s_next)
    with pytest.raises(ValueError, match="at least one transition"):
        tk.sample_transitions(mdp, log_pi, 0, np.random.default_rng(0))


def test_population_weights_are_the_joint_law(mdp, log_pi):
    all_pairs = tk.population_transitions(mdp, log_pi)
    weight, pair = all_pairs.log_weight.exp(), all_pairs.s * 3 + all_pairs.a
    sums = torch.zeros(5, 12, dtype=torch.float64).scatter_add(-1, pair, weight)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-14)
    Q = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    next_Q = Q.flatten(-2).gather(-1, all_pairs.s_next * 3 + all_pairs.a_next)
    mean = torch.zeros(5, 12, dtype=torch.float64).scatter_add(-1, pair, weight * next_Q)
    torch.testing.assert_close(mdp.R + 0.9 * mean.view(5, 4, 3), backup(mdp, log_pi.exp(), Q), rtol=0, atol=1e-14)


def test_population_of_a_batch_with_different_supports():
    P = torch.zeros(2, 2, 1, 2, dtype=torch.float64)
    P[0, :, 0, 0] = 1
    P[1, :, 0] = 0.5
    mdp = MDP(P, torch.zeros(2, 2, 1), 0.9)
    both = tk.population_transitions(mdp, torch.zeros(2, 2, 1, dtype=torch.float64))
    assert both.s.shape == (2, 4)
    assert both.log_weight[0].tolist() == [0.0, tk.ABSENT, 0.0, tk.ABSENT] and np.exp(tk.ABSENT) == 0
    torch.testing.assert_close(both.log_weight[1].exp(), torch.full((4,), 0.5, dtype=torch.float64))
    alone = tk.population_transitions(mdp[0], torch.zeros(2, 1, dtype=torch.float64))
    assert alone.s.shape == (2,)  # one MDP alone carries no absent pairs
