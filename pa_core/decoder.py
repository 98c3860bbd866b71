"""The causal softmax Transformer: one class for hand-constructed and trained weights.

Every weight has a leading run axis, so that several runs train in one pass; a single network has one run.  Shapes in
comments: G runs, B sequences a run, T tokens, D model width, H heads, d head size.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    Attributes:
        d_in: width of a token.
        d_out: width of the read-out.
        d_model, n_layer, n_head, d_head: model width, blocks, heads, size of a head.
        d_ffn: hidden width of the GELU layer of a block; 0 leaves it out.
        layer_norm: pre-LN in each block and a final LN; without it the residual stream is read as it is.
    """

    d_in: int
    d_out: int
    d_model: int = 64
    n_layer: int = 4
    n_head: int = 4
    d_head: int = 16
    d_ffn: int = 128
    layer_norm: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "layer_norm" and value < (0 if name == "d_ffn" else 1):
                raise ValueError(f"{name} must be positive, got {value!r}")


@dataclass(frozen=True)
class Record:
    """What a forward pass saw.

    Attributes:
        resid: the residual stream before each block and at the end, n_layer + 1 tensors ``[G, B, T, D]``.
        attention: the weights of each block, n_layer tensors ``[G, B, H, T, T]``.
    """

    resid: list[Tensor]
    attention: list[Tensor]


class Decoder(nn.Module):
    """Causal decoder with softmax attention scaled by 1/sqrt(d_head) and no positional embedding (paper, learned models).

    ``forward`` maps tokens ``[G, B, T, d_in]`` to ``[G, B, T, d_out]``; without the run axis it needs ``n_runs = 1``.

    Args:
        config: sizes.
        n_runs: length of the run axis.
        dtype: float32 for training, float64 for constructed weights.
        query_chunk: at most this many queries attend at once, so that long contexts need little memory.
        value_width: entries of a head's value vector that are not known to be 0 (constructed weights); None: all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        n_runs: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        query_chunk: int = 1024,
        value_width: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.n_runs, self.query_chunk, self.value_width = config, n_runs, query_chunk, value_width
        for name, shape in self.shapes(config).items():
            fill = torch.ones if name.endswith("gain") else torch.zeros
            self.register_parameter(name, nn.Parameter(fill(n_runs, *shape, dtype=dtype)))

    @staticmethod
    def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, without the run axis.  Matrices act on rows: ``y = x @ w + b``."""
        c, inner = config, config.n_head * config.d_head
        shapes: dict[str, tuple[int, ...]] = {"embed_w": (c.d_in, c.d_model), "embed_b": (1, c.d_model)}
        for layer in range(c.n_layer):
            block = {"qkv_w": (c.d_model, 3 * inner), "qkv_b": (1, 3 * inner)}
            block |= {"out_w": (inner, c.d_model), "out_b": (1, c.d_model)}
            if c.layer_norm:
                block |= {"ln1_gain": (1, c.d_model), "ln1_b": (1, c.d_model)}
            if c.d_ffn:
                block |= {"up_w": (c.d_model, c.d_ffn), "up_b": (1, c.d_ffn)}
                block |= {"down_w": (c.d_ffn, c.d_model), "down_b": (1, c.d_model)}
                if c.layer_norm:
                    block |= {"ln2_gain": (1, c.d_model), "ln2_b": (1, c.d_model)}
            shapes |= {f"block{layer}_{name}": shape for name, shape in block.items()}
        if c.layer_norm:
            shapes |= {"final_gain": (1, c.d_model), "final_b": (1, c.d_model)}
        return shapes | {"head_w": (c.d_model, c.d_out), "head_b": (1, c.d_out)}

    @torch.no_grad()
    def initialise(self, generators: list[torch.Generator]) -> "Decoder":
        """Random start, one generator a run: U(+-1/sqrt(fan_in)) as torch's Linear, residual writes / sqrt(2 n_layer)."""
        if len(generators) != self.n_runs:
            raise ValueError(f"need one generator a run: {self.n_runs} runs, {len(generators)} generators")
        shapes = self.shapes(self.config)
        for run, generator in enumerate(generators):
            for name, shape in shapes.items():
                stem, kind = name.rsplit("_", 1)
                if kind not in "wb" or f"{stem}_w" not in shapes:
                    continue  # LayerNorm starts as the identity
                bound = 1 / math.sqrt(shapes[f"{stem}_w"][0])
                if kind == "w" and stem.endswith(("out", "down")):
                    bound /= math.sqrt(2 * self.config.n_layer)
                values = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound
                getattr(self, name)[run].copy_(values)
        return self

    @property
    def n_parameters(self) -> int:
        """Number of weights of one run."""
        return sum(math.prod(shape) for shape in self.shapes(self.config).values())

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return torch.baddbmm(getattr(self, f"{name}_b"), x.flatten(1, -2), getattr(self, f"{name}_w")).unflatten(
            1, x.shape[1:-1]
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if not self.config.layer_norm:
            return x
        gain, bias = getattr(self, f"{name}_gain"), getattr(self, f"{name}_b")
        return F.layer_norm(x, x.shape[-1:]) * gain[:, None] + bias[:, None]  # [G, B, T, D]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, first: int, weights: list[Tensor] | None) -> Tensor:
        """Causal attention of the queries at positions first, first + 1, ...; q, k, v ``[G, B, H, T, d]``."""
        mixed, width = [], v.shape[-1]
        if q.shape[-2] > self.query_chunk:
            k, v = k.contiguous(), v[..., : self.value_width].contiguous()  # once, not in every chunk
        for start in range(0, q.shape[-2], self.query_chunk):
            chunk = q[..., start : start + self.query_chunk, :]
            seen = first + start + chunk.shape[-2]  # keys that the last query of the chunk may see
            scores = chunk @ k[..., :seen, :].transpose(-2, -1) / math.sqrt(self.config.d_head)  # [G, B, H, t, seen]
            later = torch.ones(chunk.shape[-2], seen, dtype=torch.bool, device=q.device).triu(first + start + 1)
            attention = (scores + torch.zeros_like(later, dtype=q.dtype).masked_fill(later, -math.inf)).softmax(-1)
            mixed.append(attention @ v[..., :seen, :])
            if weights is not None:
                weights.append(F.pad(attention, (0, k.shape[-2] - seen)))
        out = mixed[0] if len(mixed) == 1 else torch.cat(mixed, -2)
        return out if out.shape[-1] == width else F.pad(out, (0, width - out.shape[-1]))

    def forward(self, tokens: Tensor, *, last: int | None = None, record: Record | None = None) -> Tensor:
        """Run the decoder.

        Args:
            tokens: ``[G, B, T, d_in]``, or ``[B, T, d_in]`` for one run.
            last: read only the last so many positions; the last block is then computed for them alone.
            record: filled with the residual stream before each block and at the end, and with attention weights.

        Returns:
            ``[G, B, T, d_out]`` (``[G, B, last, d_out]``), without G if `tokens` came without it.
        """
        if tokens.dim() == 3:
            return self(tokens[None], last=last, record=record)[0]
        c = self.config
        if tokens.dim() != 4 or tokens.shape[0] != self.n_runs or tokens.shape[-1] != c.d_in:
            raise ValueError(f"tokens must be [{self.n_runs}, B, T, {c.d_in}], got {tuple(tokens.shape)}")
        n_tokens = tokens.shape[2]
        x = self._linear(tokens, "embed")  # [G, B, T, D]
        for layer in range(c.n_layer):
            name = f"block{layer}"
            if record is not None:
                record.resid.append(x)
            qkv = self._linear(self._norm(x, f"{name}_ln1"), f"{name}_qkv")
            q, k, v = qkv.unflatten(-1, (3, c.n_head, c.d_head)).permute(3, 0, 1, 4, 2, 5)  # each [G, B, H, T, d]
            first = 0
            if last is not None and layer == c.n_layer - 1 and record is None:
                first = n_tokens - last
                q, x = q[..., first:, :], x[..., first:, :]
            weights = None if record is None else []
            mixed = self._attend(q, k, v, first, weights).transpose(2, 3).flatten(-2)  # [G, B, T, H d]
            x = x + self._linear(mixed, f"{name}_out")
            if record is not None:
                record.attention.append(torch.cat(weights, -2))
            if c.d_ffn:
                hidden = F.gelu(self._linear(self._norm(x, f"{name}_ln2"), f"{name}_up"))
                x = x + self._linear(hidden, f"{name}_down")
        if record is not None:
            record.resid.append(x)
        if last is not None:
            x = x[..., x.shape[-2] - last :, :]
        return self._linear(self._norm(x, "final"), "head")
