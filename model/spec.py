"""A decoder, described by data.

`families` makes a `DecoderSpec` from a Hugging Face config, `transformer` builds and runs it. Later kinds add
a field here (caps, experts, a latent head) and a branch where the layer is built, never another model file.
"""

from dataclasses import dataclass

from ..core.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware scaling that sets in beyond ``original_length`` tokens and grows with the length (see `rope`)."""

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by ``factor``, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). ``attention_factor`` multiplies the rotated queries and keys."""

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own, ``[head_dim / 2]``, as GGUF files write Llama 3's scaling."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over all of a head, its halves rotated against each other."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a checkpoint's modules for each slot of the decoder; those of a layer stand below ``layer``.

    A slot with several names holds their weights as one matrix, rows in this order.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm"
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that the forward pass must know, and nothing of where it came from.

    ``windows[i]`` is the number of newest tokens that layer ``i`` sees, the token itself counted, or ``None``
    for all of them. ``dtype`` is the one the checkpoint was saved in.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: RopeSpec
    norm_eps: float
    attention_scale: float
    max_position_embeddings: int
    dtype: str
    activation: str = "silu"
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    names: WeightNames = WeightNames()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if self.activation != "silu":
            raise ValueError(f"activation {self.activation!r} is not supported; supported: silu")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def kv_layout(self, block_size: int, dtype: str) -> KvLayout:
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)
