"""From a Hugging Face ``config.json`` to a `DecoderSpec`, one small function a family.

Defaults are those of the family's configuration class in Transformers. Both ways to write rope are read: the
old ``rope_theta`` with ``rope_scaling`` and the ``rope_parameters`` of Transformers 5.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .spec import (
    DecoderSpec,
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

Config = Mapping[str, object]


def decoder_spec(config: Config) -> DecoderSpec:
    """Raises ``ValueError`` for an architecture, rope type or activation that is not supported."""
    architectures = config.get("architectures")
    known = [name for name in architectures if name in FAMILIES] if isinstance(architectures, list) else []
    if not known:
        raise ValueError(f"architectures {architectures} not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[known[0]](config)


def llama(config: Config) -> DecoderSpec:
    has_bias, has_mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return replace(_plain(config), has_qkv_bias=has_bias, has_o_bias=has_bias, has_mlp_bias=has_mlp_bias)


def mistral(config: Config) -> DecoderSpec:
    plain = _plain({"num_key_value_heads": 8, **config})
    return replace(plain, windows=_windows(config, plain.num_layers, config.get("sliding_window", 4096)))


def qwen2(config: Config) -> DecoderSpec:
    plain = _plain(config)
    return replace(plain, windows=_qwen_windows(config, plain.num_layers), has_qkv_bias=True)


def qwen3(config: Config) -> DecoderSpec:
    plain = _plain({"head_dim": 128, **config})
    windows, has_bias = _qwen_windows(config, plain.num_layers), bool(config.get("attention_bias"))
    return replace(plain, windows=windows, has_qk_norm=True, has_qkv_bias=has_bias, has_o_bias=has_bias)


FAMILIES: Mapping[str, Callable[[Config], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def _plain(config: Config) -> DecoderSpec:
    """What all families share: no biases, no windows."""
    num_heads, hidden_size = _int(config, "num_attention_heads"), _int(config, "hidden_size")
    head_dim = _int(config, "head_dim", hidden_size // num_heads)
    return DecoderSpec(
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_int(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        windows=(None,) * _int(config, "num_hidden_layers"),
        rope=_rope(config),
        norm_eps=_float(config, "rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        max_position_embeddings=_int(config, "max_position_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        activation=str(config.get("hidden_act", "silu")),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _windows(config: Config, num_layers: int, window: object, first_windowed: int = 0) -> tuple[int | None, ...]:
    """``layer_types`` decides where it is given, else all layers from ``first_windowed`` on have the window."""
    if window is None:
        return (None,) * num_layers
    assert isinstance(window, int), f"sliding_window is {window!r}, not a number of tokens"
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return tuple(window if layer >= first_windowed else None for layer in range(num_layers))


def _qwen_windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return _windows(config, num_layers, window, _int(config, "max_window_layers", 28))


def _rope(config: Config) -> RopeSpec:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"rope parameters must be one flat map for all layers, got {given!r}")
    rope: Config = given
    if _float(rope, "partial_rotary_factor", _float(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("a partial_rotary_factor other than 1 is not supported")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return RopeSpec(_float(rope, "rope_theta", _float(config, "rope_theta", 10_000.0)), ROPE_TYPES[kind](rope, config))


def _linear(rope: Config, config: Config) -> RopeScaling:
    return LinearScaling(_float(rope, "factor"))


def _dynamic(rope: Config, config: Config) -> RopeScaling:
    return DynamicScaling(_float(rope, "factor"), _int(config, "max_position_embeddings"))


def _llama3(rope: Config, config: Config) -> RopeScaling:
    low, high = _float(rope, "low_freq_factor"), _float(rope, "high_freq_factor")
    return Llama3Scaling(_float(rope, "factor"), low, high, _original_length(rope, config))


def _frequency_factors(rope: Config, config: Config) -> RopeScaling:
    factors = rope.get("frequency_factors")
    if not isinstance(factors, Sequence) or not factors:
        raise ValueError(f"frequency_factors is {factors!r}, not a list of numbers")
    return FrequencyFactors(tuple(float(factor) for factor in factors))


def _yarn(rope: Config, config: Config) -> RopeScaling:
    original_length = _original_length(rope, config)
    factor = _float(rope, "factor", _int(config, "max_position_embeddings") / original_length)
    return YarnScaling(
        factor=factor,
        original_length=original_length,
        attention_factor=_float(rope, "attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=_float(rope, "beta_fast", 32.0),
        beta_slow=_float(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
    )


ROPE_TYPES: Mapping[str, Callable[[Config, Config], RopeScaling | None]] = {
    "default": lambda rope, config: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _frequency_factors,
}


def _yarn_attention_factor(rope: Config, factor: float) -> float:
    """The paper's ``0.1 ln(factor) + 1``, or the ratio of two such terms where DeepSeek's ``mscale`` are given."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = _float(rope, "mscale", 0.0), _float(rope, "mscale_all_dim", 0.0)
    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def _original_length(rope: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    return _int(config, key, _int(rope, key, _int(config, "max_position_embeddings")))


def _int(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int):
        raise ValueError(f"config: {key!r} is {value!r}, not an integer")
    return value


def _float(config: Config, key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise ValueError(f"config: {key!r} is {value!r}, not a number")
    return float(value)
