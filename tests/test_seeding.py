"""Named random streams: stable, distinct, independent of the global generators."""

import numpy as np
import pytest
import torch

from pa_core.seeding import rng_for, seed_sequence, torch_generator


def test_a_name_fixes_its_stream_whatever_else_was_drawn():
    first = rng_for("test", "s4", 0).random(5)
    rng_for("other").random(100)
    np.random.seed(1)
    torch.manual_seed(1)
    assert (rng_for("test", "s4", 0).random(5) == first).all()


def test_streams_are_pinned():
    # Literal values: a change of the derivation would silently change every committed result.
    assert rng_for("pin", 0).integers(1 << 32, size=2).tolist() == [3363372294, 740764681]
    assert torch.randint(1 << 32, (2,), generator=torch_generator("pin", 0)).tolist() == [851243006, 2056912906]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("b", "a")),
        (("1",), (1,)),
        (("a", 1), ("a1",)),
        (("a",), ("a", "")),
        ((11, 1), (1, 11)),
        (("s1:a",), ("a",)),
        (("train", 0), ("train", 1)),
        (("train", 0), ("test", 0)),
    ],
)
def test_different_names_give_different_streams(one, two):
    assert (rng_for(*one).random(4) != rng_for(*two).random(4)).all()


def test_roots_separate_streams():
    assert (rng_for("a", root=1).random(4) != rng_for("a", root=2).random(4)).all()


def test_numpy_integers_name_the_same_stream_as_python_integers():
    assert seed_sequence("a", np.int64(3)).entropy == seed_sequence("a", 3).entropy


def test_streams_look_independent():
    draws = np.stack([rng_for("independent", i).standard_normal(2000) for i in range(20)])
    off_diagonal = np.corrcoef(draws)[np.triu_indices(20, 1)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(2000)  # 190 correlations of standard error 1/sqrt(2000)


def test_global_generators_are_not_touched():
    np.random.seed(3)
    torch.manual_seed(3)
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    rng_for("x").random(3)
    torch.rand(3, generator=torch_generator("x"))
    assert (np.random.get_state()[1] == numpy_before).all()
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("name", [(), (1.0,), (None,), (True,), ("a", (1, 2))])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match="stream"):
        seed_sequence(*name)
