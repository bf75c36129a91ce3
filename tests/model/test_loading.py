"""Weights on their way into the layers: what is missing or misshapen is named, nothing is read twice."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from crossdock.model.loading import RandomWeights, build_transformer, random_transformer, weight_shapes
from crossdock.model.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    windows=(None, None),
    rope=RopeSpec(10_000.0),
    norm_eps=1e-6,
    attention_scale=2**-0.5,
    max_position_embeddings=32,
    dtype="float32",
    has_qkv_bias=True,
)


class Listed:
    """Weights whose every reading is noted."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.reads: Counter[str] = Counter()

    def names(self) -> set[str]:
        return set(self.tensors)

    def get(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self.tensors[name]


def listed() -> Listed:
    weights = RandomWeights(SPEC, seed=0)
    return Listed({name: weights.get(name) for name in weights.names()})


def test_every_weight_is_read_once_and_layers_are_counted() -> None:
    weights, progress = listed(), list[tuple[int, int]]()
    build_transformer(SPEC, weights, torch.float32, on_progress=lambda done, total: progress.append((done, total)))
    assert weights.reads == Counter(weights.names())
    assert progress == [(1, 2), (2, 2)]


def test_a_checkpoint_may_hold_more_than_is_needed() -> None:
    weights = listed()
    weights.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    build_transformer(SPEC, weights, torch.float32)


def test_missing_weights_are_named() -> None:
    weights = listed()
    del weights.tensors["lm_head.weight"], weights.tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match=r"lacks 2 weights: .*\.1\.self_attn\.k_proj\.bias, lm_head\.weight"):
        build_transformer(SPEC, weights, torch.float32)


def test_a_weight_of_another_shape_is_named_with_both_shapes() -> None:
    weights = listed()
    weights.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(12, 9)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight has shape \(12, 9\).*\(12, 8\)"):
        build_transformer(SPEC, weights, torch.float32)


def test_fused_weights_keep_the_order_of_their_parts() -> None:
    weights = listed()
    layer = build_transformer(SPEC, weights, torch.float32).layers[0]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    normed = x * (x.square().mean(-1, keepdim=True) + SPEC.norm_eps).rsqrt()  # a random model's norms weigh 1
    parts = [
        normed @ weights.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].T
        + weights.tensors[f"model.layers.0.self_attn.{name}_proj.bias"]
        for name in "qkv"
    ]
    torch.testing.assert_close(layer.qkv(x), torch.cat(parts, -1))


def test_random_weights_follow_the_seed_and_have_the_spec_s_shapes() -> None:
    assert dict(weight_shapes(SPEC))["model.layers.1.self_attn.v_proj.weight"] == (4, 8)
    first, second, other = (random_transformer(SPEC, seed, torch.bfloat16).embedding for seed in (0, 0, 1))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
