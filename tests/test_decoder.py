"""The decoder against a plain loop in NumPy; causality; chunks, `last`, runs and records change nothing."""

import math

import numpy as np
import pytest
import torch
from scipy.special import erf

from pa_core.decoder import Decoder, DecoderConfig, Record
from pa_core.seeding import torch_generator
from pa_core.tokens import TokenLayout


def make(n_runs=1, dtype=torch.float64, **sizes):
    config = DecoderConfig(**(dict(d_in=7, d_out=3, d_model=12, n_layer=3, n_head=2, d_head=5, d_ffn=9) | sizes))
    decoder = Decoder(config, n_runs, dtype=dtype).initialise([torch_generator("test", g) for g in range(n_runs)])
    with torch.no_grad():  # gains and biases that are not the identity's
        for i, (name, p) in enumerate(sorted(decoder.named_parameters())):
            if name.endswith(("gain", "_b")):
                p += 0.3 * torch.randn(p.shape, dtype=dtype, generator=torch_generator("bias", i))
    return decoder


def tokens_of(decoder, B=2, T=11, name=0):
    shape = (decoder.n_runs, B, T, decoder.config.d_in)
    return torch.randn(shape, dtype=torch.float64, generator=torch_generator("tokens", name)).to(decoder.embed_w.dtype)


def by_hand(decoder, x, run=0):
    """One sequence ``[T, d_in]`` through one run, token by token, with NumPy alone."""
    w = {name: p[run].detach().double().numpy() for name, p in decoder.named_parameters()}
    c = decoder.config

    def norm(v, name):
        if not c.layer_norm:
            return v
        return (v - v.mean()) / math.sqrt(v.var() + 1e-5) * w[f"{name}_gain"][0] + w[f"{name}_b"][0]

    linear = lambda v, name: v @ w[f"{name}_w"] + w[f"{name}_b"][0]
    stream = [linear(v, "embed") for v in x]
    for layer in range(c.n_layer):
        name = f"block{layer}"
        qkv = [linear(norm(v, f"{name}_ln1"), f"{name}_qkv").reshape(3, c.n_head, c.d_head) for v in stream]
        out = []
        for t, v in enumerate(stream):
            heads = []
            for h in range(c.n_head):
                scores = np.array([qkv[t][0, h] @ qkv[j][1, h] for j in range(t + 1)]) / math.sqrt(c.d_head)
                weight = np.exp(scores - scores.max())
                heads.append(sum(a * qkv[j][2, h] for j, a in enumerate(weight / weight.sum())))
            v = v + linear(np.concatenate(heads), f"{name}_out")
            if c.d_ffn:
                z = linear(norm(v, f"{name}_ln2"), f"{name}_up")
                v = v + linear(z * (1 + erf(z / math.sqrt(2))) / 2, f"{name}_down")
            out.append(v)
        stream = out
    return np.array([linear(norm(v, "final"), "head") for v in stream])


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("d_ffn", [0, 9])
def test_equals_a_loop_in_numpy(layer_norm, d_ffn):
    decoder = make(n_runs=2, layer_norm=layer_norm, d_ffn=d_ffn)
    x = tokens_of(decoder)
    out = decoder(x).detach().numpy()
    for run in range(2):
        for b in range(2):
            # two float64 evaluations of some 1e3 operations each
            np.testing.assert_allclose(out[run, b], by_hand(decoder, x[run, b].numpy(), run), rtol=0, atol=1e-12)


def test_later_tokens_have_no_effect():
    decoder = make()
    x = tokens_of(decoder)
    out = decoder(x)
    for t in (0, 4, 9):
        changed = x.clone()
        changed[:, :, t + 1 :] = 1e3
        assert torch.equal(decoder(changed)[:, :, : t + 1], out[:, :, : t + 1])
        # a shorter sequence is another matrix product, so the last bit may differ
        torch.testing.assert_close(decoder(x[:, :, : t + 1]), out[:, :, : t + 1], rtol=0, atol=1e-13)
    changed = x.clone()
    changed[:, :, 0] += 1
    assert (decoder(changed)[:, :, 5] - out[:, :, 5]).abs().min() > 1e-6  # earlier tokens do


@pytest.mark.parametrize("chunk", [1, 3, 11])
@pytest.mark.parametrize("last", [1, 4, 11])
def test_chunks_and_last_change_nothing(chunk, last):
    decoder = make()
    x = tokens_of(decoder)
    full = decoder(x)
    decoder.query_chunk = chunk
    torch.testing.assert_close(decoder(x, last=last), full[:, :, -last:], rtol=0, atol=1e-13)  # order of sums only
    record = Record([], [])
    torch.testing.assert_close(decoder(x, last=last, record=record), full[:, :, -last:], rtol=0, atol=1e-13)


def test_record_shows_the_stream_and_the_weights():
    decoder = make()
    record = Record([], [])
    x = tokens_of(decoder)
    out = decoder(x, record=record)
    assert len(record.resid) == 4 and len(record.attention) == 3
    assert torch.equal(decoder._linear(decoder._norm(record.resid[-1], "final"), "head"), out)
    for weights in record.attention:
        assert weights.shape == (1, 2, 2, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 2, 11, dtype=torch.float64), rtol=0, atol=1e-14)
        assert (weights.triu(1) == 0).all()


def test_value_width_skips_only_zeros():
    decoder = make(layer_norm=False, d_ffn=0)
    c = decoder.config
    with torch.no_grad():
        for layer in range(c.n_layer):
            for part in "wb":
                qkv = getattr(decoder, f"block{layer}_qkv_{part}").unflatten(-1, (3, c.n_head, c.d_head))
                qkv[..., 2, :, 2:] = 0
    x = tokens_of(decoder)
    full = decoder(x)
    decoder.query_chunk, decoder.value_width = 4, 2
    torch.testing.assert_close(decoder(x), full, rtol=0, atol=1e-13)


def test_runs_are_independent():
    decoder = make(n_runs=3)
    x = tokens_of(decoder)
    out = decoder(x)
    single = Decoder(decoder.config, dtype=torch.float64)
    for run in range(3):
        single.load_state_dict({name: p[run : run + 1] for name, p in decoder.state_dict().items()})
        torch.testing.assert_close(single(x[run]), out[run], rtol=0, atol=1e-13)  # batched against single products
    out[1].sum().backward()
    assert all((p.grad[0] == 0).all() and (p.grad[2] == 0).all() for p in decoder.parameters())


def test_the_papers_size():
    layout = TokenLayout(8, 3)
    actor, critic = (Decoder(DecoderConfig(layout.width, d_out)) for d_out in (3, 2))
    assert actor.n_parameters + critic.n_parameters == 272_453
    assert actor.n_parameters == sum(p.numel() for p in actor.parameters())


def test_start_depends_on_its_generator_alone():
    config = DecoderConfig(7, 3)
    start = lambda *names: Decoder(config, len(names)).initialise([torch_generator("start", n) for n in names])
    one, two = start(0), start(5, 0)
    for name, p in one.named_parameters():
        assert torch.equal(p[0], getattr(two, name)[1])
    assert not torch.equal(two.embed_w[0], two.embed_w[1])
    assert one.embed_w.abs().max() <= 1 / math.sqrt(7) and (one.block0_ln1_gain == 1).all()
    with pytest.raises(ValueError, match="one generator a run"):
        Decoder(config, 2).initialise([torch_generator("start", 0)])


@pytest.mark.parametrize(("shape", "message"), [((2, 4, 6), "tokens must be"), ((2, 3, 4, 7), "tokens must be")])
def test_wrong_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="n_layer must be positive"):
        DecoderConfig(7, 3, n_layer=0)
