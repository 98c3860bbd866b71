"""Random families, the ring, Gymnasium tables (terminal rule, duplicates) and a reader's own file."""

import gymnasium
import numpy as np
import pytest
import torch

from pa_core.families import (
    dirichlet_log_policies,
    from_gymnasium,
    load_npz,
    random_mdps,
    ring_mdp,
    sparse_reward_mdps,
)
from pa_core.mdp import solve
from pa_core.seeding import rng_for


class TableEnv:
    """The least that `from_gymnasium` needs of an environment: a transition table."""

    def __init__(self, table):
        self.P = table
        self.unwrapped = self


# ---- random families ----


def test_random_mdps_follow_their_laws():
    mdp = random_mdps(400, 4, 3, gamma=0.9, reward_range=(-2.0, 3.0), rng=np.random.default_rng(0))
    assert mdp.P.shape == (400, 4, 3, 4) and mdp.R.shape == (400, 4, 3)
    n = 400 * 12
    # Dirichlet(1,1,1,1): mean 1/4, variance 3/80; uniform on [-2, 3]: mean 1/2, variance 25/12.  Five standard errors.
    assert (mdp.P.mean((0, 1, 2)) - 0.25).abs().max() < 5 * np.sqrt(3 / 80 / n)
    assert (mdp.P.var((0, 1, 2)) - 3 / 80).abs().max() < 5 * np.sqrt(2 / n) * 3 / 80
    assert abs(mdp.R.mean() - 0.5) < 5 * np.sqrt(25 / 12 / n)
    assert -2 <= mdp.R.min() < -1.99 and 2.99 < mdp.R.max() <= 3


def test_concentration_sets_sparsity():
    largest = [
        random_mdps(50, 6, 3, gamma=0.9, concentration=c, rng=np.random.default_rng(0)).P.amax(-1).mean().item()
        for c in (0.01, 0.1, 1.0, 100.0)
    ]
    assert largest[0] > 0.95 > largest[1] > 0.7 > largest[2] > 0.25 > largest[3] > 1 / 6


def test_same_stream_same_mdps_and_another_seed_others():
    draw = lambda *name: random_mdps(2, 3, 2, gamma=0.9, rng=rng_for(*name))
    assert torch.equal(draw("a").P, draw("a").P) and torch.equal(draw("a").R, draw("a").R)
    assert not torch.equal(draw("a").P, draw("b").P)


def test_sparse_rewards_are_signs_at_the_given_rate():
    R = sparse_reward_mdps(200, 5, 4, gamma=0.9, reward_rate=0.2, rng=np.random.default_rng(1)).R
    assert set(R.unique().tolist()) == {-1.0, 0.0, 1.0}
    n = R.numel()
    assert abs((R != 0).double().mean() - 0.2) < 5 * np.sqrt(0.16 / n)  # five standard errors of a proportion
    assert abs(R.mean()) < 5 * np.sqrt(0.2 / n)


def test_dirichlet_policies_are_normalised_with_full_support():
    log_pi = dirichlet_log_policies(100, 4, 3, np.random.default_rng(2), concentration=0.01)
    assert torch.isfinite(log_pi).all()
    assert torch.logsumexp(log_pi, -1).abs().max() < 1e-12  # a sum of three terms
    pi = dirichlet_log_policies(2000, 4, 3, np.random.default_rng(2)).exp()
    assert (pi.mean((0, 1)) - 1 / 3).abs().max() < 5 * np.sqrt(1 / 18 / 8000)  # Dirichlet(1,1,1): variance 1/18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1"),
        ({"n_states": 0}, "n_states must be an integer >= 1"),
        ({"n_actions": 2.0}, "n_actions must be an integer >= 1"),
        ({"concentration": 0.0}, "concentration must be positive"),
        ({"concentration": float("nan")}, "concentration must be positive"),
        ({"reward_range": (1.0, -1.0)}, "reward_range"),
        ({"reward_range": (0.0, float("inf"))}, "reward_range"),
        ({"gamma": 1.0}, "gamma must be a number"),
    ],
)
def test_bad_family_arguments_are_refused(change, message):
    arguments = {"n": 2, "n_states": 3, "n_actions": 2, "gamma": 0.9, "rng": np.random.default_rng(0)} | change
    with pytest.raises(ValueError, match=message):
        random_mdps(arguments.pop("n"), arguments.pop("n_states"), arguments.pop("n_actions"), **arguments)


# ---- the ring ----


def test_ring_moves_pays_and_slips_as_described():
    ring = ring_mdp(6, 3, gamma=0.9, slip=0.3)
    assert ring.P[0, 2].tolist() == pytest.approx([0.1, 0.8, 0, 0, 0, 0.1])  # right, or a third of the slip each way
    assert ring.P[0, 0].tolist() == pytest.approx([0.1, 0.1, 0, 0, 0, 0.8])
    assert ring.R[:, 1].tolist() == [1, 0, 0, -1, 0, 0]
    assert ring.R[0].tolist() == pytest.approx([0.9, 1, 0.9])
    best = solve(ring_mdp(6, 3, gamma=0.9, slip=0.0)).pi_star.argmax(-1).tolist()
    assert best[0] == 1 and best[1] == best[2] == 0 and best[4] == best[5] == 2  # walk to state 0 the short way, then stay


def test_ring_is_symmetric_under_reflection():
    solution = solve(ring_mdp(7, 3, gamma=0.9))
    # Odd ring: the paying pair 0 and 3 is not antipodal, so reflect about the axis through 0 with the cost at -3 as well.
    ring = ring_mdp(7, 3, gamma=0.9)
    R = ring.R.clone()
    R[3] += 0.5
    R[4] -= 0.5
    V = solve(type(ring)(ring.P, R, 0.9)).V_star
    torch.testing.assert_close(V[1:], V[1:].flip(0), rtol=0, atol=1e-13)
    assert not torch.allclose(solution.V_star[1:], solution.V_star[1:].flip(0))


# ---- Gymnasium ----


def table_values(table, gamma, rounds):
    """Optimal values straight from a Gymnasium table: value iteration in which `done` ends the episode."""
    V = {s: 0.0 for s in table}
    for _ in range(rounds):
        V = {
            s: max(sum(p * (r + gamma * V[t] * (not done)) for p, t, r, done in outcomes) for outcomes in acts.values())
            for s, acts in table.items()
        }
    return np.array([V[s] for s in sorted(V)])


@pytest.mark.parametrize(
    ("name", "options", "n_states", "n_actions"),
    [
        ("FrozenLake-v1", {}, 16, 4),  # holes and goal rest: no state is added
        ("FrozenLake-v1", {"map_name": "8x8", "is_slippery": False}, 64, 4),
        ("CliffWalking-v1", {}, 49, 4),  # the goal does not rest: one sink more than the 48 cells
        ("Taxi-v4", {}, 501, 6),
    ],
)
def test_optimal_values_are_those_of_the_episodic_table(name, options, n_states, n_actions):
    gamma = 0.8
    mdp = from_gymnasium(name, gamma=gamma, **options)
    assert (mdp.n_states, mdp.n_actions) == (n_states, n_actions)
    table = gymnasium.make(name, **options).unwrapped.P
    expected = table_values(table, gamma, rounds=120)
    V = solve(mdp).V_star.numpy()
    # gamma^120 = 2e-12 times a value of at most 50 is left of the iteration.
    np.testing.assert_allclose(V[: len(expected)], expected, rtol=0, atol=1e-9)
    assert (V[len(expected) :] == 0).all()


def test_frozen_lake_by_hand():
    lake = from_gymnasium("FrozenLake-v1", gamma=0.9, is_slippery=False)
    assert solve(lake).V_star[0].item() == pytest.approx(0.9**5, rel=1e-13)  # six steps; the last one pays
    slippery = from_gymnasium("FrozenLake-v1", gamma=0.9)
    # Going left in the corner: two of three slips leave you there; the repeated outcome is summed, not overwritten.
    assert slippery.P[0, 0, 0].item() == pytest.approx(2 / 3, rel=1e-15)
    assert slippery.P[0, 0, 4].item() == pytest.approx(1 / 3, rel=1e-15)
    assert slippery.R[14, 1].item() == pytest.approx(1 / 3, rel=1e-15)  # expected reward, not the reward of an outcome
    for rest in (5, 7, 11, 12, 15):
        assert (slippery.P[rest, :, rest] == 1).all() and (slippery.R[rest] == 0).all()


def test_cliff_walking_by_hand():
    gamma = 0.9
    cliff = from_gymnasium("CliffWalking-v1", gamma=gamma)
    goal, sink = 47, 48
    assert cliff.P[35, 2, sink] == 1 and cliff.P[35, 2, goal] == 0  # down into the goal ends the episode
    assert (cliff.P[sink, :, sink] == 1).all() and (cliff.R[sink] == 0).all()
    assert cliff.R[36, 1].item() == -100 and cliff.P[36, 1, 36] == 1  # off the cliff, back to the start, not done
    assert solve(cliff).V_star[36].item() == pytest.approx(-(1 - gamma**13) / (1 - gamma), rel=1e-12)  # 13 steps at -1


def test_taxi_by_hand():
    env = gymnasium.make("Taxi-v4").unwrapped
    taxi = from_gymnasium(env, gamma=0.9)
    at_goal = env.encode(0, 0, 4, 0)  # passenger on board, at the destination
    assert taxi.P[at_goal, 5, 500] == 1 and taxi.R[at_goal, 5] == 20
    assert solve(taxi).V_star[at_goal].item() == pytest.approx(20, rel=1e-13)
    one_step_south = env.encode(1, 0, 4, 0)
    assert solve(taxi).V_star[one_step_south].item() == pytest.approx(-1 + 0.9 * 20, rel=1e-13)


def test_terminal_rule_looks_at_the_target_and_sums_duplicates():
    stay = {0: [(1.0, 1, 0.0, True)], 1: [(0.5, 1, 0.0, True), (0.5, 1, 0.0, True)]}
    table = {
        0: {0: [(0.25, 1, 4.0, True), (0.25, 2, 8.0, True), (0.5, 2, 2.0, False)], 1: [(0.5, 0, 1.0, False)] * 2},
        1: stay,  # rests: done transitions may go there
        2: {0: [(1.0, 2, 1.0, False)], 1: [(1.0, 2, 0.0, False)]},  # loops on itself, but pays: no resting state
    }
    mdp = from_gymnasium(TableEnv(table), gamma=0.5)
    assert mdp.n_states == 4
    assert mdp.P[0, 0].tolist() == [0, 0.25, 0.5, 0.25]
    assert mdp.R[0].tolist() == [0.25 * 4 + 0.25 * 8 + 0.5 * 2, 1.0]
    assert mdp.P[0, 1].tolist() == [1, 0, 0, 0] and mdp.P[1, 1].tolist() == [0, 1, 0, 0]
    assert mdp.P[3, :, 3].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({0: {0: [(1.0, 0, 0.0, False)]}, 1: {0: [(1.0, 0, 0.0, False)], 1: []}}, r"state 1 has actions \[0, 1\]"),
        ({0: {0: [(0.5, 0, 0.0, False)]}}, r"sums to 0.5, not 1, at index \(0, 0\)"),
        ({0: {0: [(1.0, 7, 0.0, False)]}}, "state 0, action 0 leads to 7"),
        ({}, "no transition table P"),
        (None, "no transition table P"),
    ],
)
def test_broken_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        from_gymnasium(TableEnv(table), gamma=0.9)


def test_environments_without_a_table_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'CartPole-v1' has no transition table P"):
        from_gymnasium("CartPole-v1", gamma=0.9)
    with pytest.raises(ValueError, match="Gymnasium cannot make 'NoSuchLake-v1'"):
        from_gymnasium("NoSuchLake-v1", gamma=0.9)
    with pytest.raises(ValueError, match="Gymnasium cannot make 'FrozenLake-v1'"):
        from_gymnasium("FrozenLake-v1", gamma=0.9, no_such_option=1)
    with pytest.raises(ValueError, match="options such as map_name"):
        from_gymnasium(TableEnv({0: {0: [(1.0, 0, 0.0, False)]}}), gamma=0.9, map_name="8x8")


# ---- a reader's file ----


def test_npz_round_trip(tmp_path):
    mdp = random_mdps(1, 4, 3, gamma=0.7, rng=np.random.default_rng(3))[0]
    np.savez(tmp_path / "mine.npz", P=mdp.P.numpy(), R=mdp.R.numpy(), gamma=0.7, notes="ignored")
    loaded = load_npz(tmp_path / "mine.npz")
    assert torch.equal(loaded.P, mdp.P) and torch.equal(loaded.R, mdp.R) and loaded.gamma == 0.7
    assert load_npz(str(tmp_path / "mine.npz"), gamma=0.5).gamma == 0.5
    np.savez(tmp_path / "integers.npz", P=np.ones((1, 1, 1), dtype=int), R=np.array([[2]]), gamma=0)
    assert load_npz(tmp_path / "integers.npz").R.item() == 2.0


P1, R1 = np.ones((1, 1, 1)), np.ones((1, 1))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"P": P1, "R": R1}, r"no array 'gamma'; it holds \['P', 'R'\]"),
        ({"R": R1, "gamma": 0.9}, "no array 'P'"),
        ({"P": P1, "R": R1, "gamma": [0.9, 0.8]}, r"gamma must be one number, got shape \(2,\)"),
        ({"P": P1, "R": R1, "gamma": 1.0}, "gamma must be a number with 0 <= gamma < 1"),
        ({"P": P1.astype(str), "R": R1, "gamma": 0.9}, "array 'P' must hold real numbers"),
        ({"P": P1.astype(object), "R": R1, "gamma": 0.9}, "array 'P' cannot be read"),
        ({"P": P1 * 0.5, "R": R1, "gamma": 0.9}, r"sums to 0.5, not 1, at index \(0, 0\)"),
        ({"P": P1, "R": R1[0], "gamma": 0.9}, "R must have shape"),
    ],
)
def test_bad_files_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_npz(tmp_path / "bad.npz")


def test_files_that_are_no_archives_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_npz(tmp_path / "missing.npz")
    for name, write in {
        "text.npz": lambda p: p.write_text("P, R, gamma"),
        "empty.npz": lambda p: p.write_bytes(b""),
        "single.npz": lambda p: np.save(p.open("wb"), P1),
        "pickle.npz": lambda p: np.save(p.open("wb"), P1.astype(object), allow_pickle=True),
        "broken.npz": lambda p: p.write_bytes(b"PK\x03\x04 and then nothing"),
    }.items():
        write(tmp_path / name)
        with pytest.raises(ValueError, match="is not an .npz archive"):
            load_npz(tmp_path / name)
