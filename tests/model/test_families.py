"""What each family reads from its config.json, in the old and the new way to write rope, and what it refuses."""

import pytest

from crossdock.model.families import decoder_spec
from crossdock.model.spec import DynamicScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

SIZES: dict[str, object] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def config(architecture: str, **more: object) -> dict[str, object]:
    return {"architectures": [architecture], **SIZES, **more}


def rope_of(**more: object) -> RopeSpec:
    return decoder_spec(config("LlamaForCausalLM", **more)).rope


def test_a_bare_llama_config_gets_the_defaults_of_its_class() -> None:
    spec = decoder_spec(config("LlamaForCausalLM"))
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.attention_scale) == (8, 8, 1e-6, 8**-0.5)
    assert spec.rope == RopeSpec(10_000.0)
    assert spec.windows == (None,) * 4
    assert not (spec.has_qk_norm or spec.has_qkv_bias or spec.has_o_bias or spec.has_mlp_bias)
    assert not spec.has_tied_embeddings


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(key: str) -> None:
    assert decoder_spec(config("LlamaForCausalLM", **{key: "bfloat16"})).dtype == "bfloat16"


def test_llama_biases_are_two_flags() -> None:
    spec = decoder_spec(config("LlamaForCausalLM", attention_bias=True))
    assert (spec.has_qkv_bias, spec.has_o_bias, spec.has_mlp_bias) == (True, True, False)
    assert decoder_spec(config("LlamaForCausalLM", mlp_bias=True)).has_mlp_bias


def test_qwen2_always_has_biases_on_q_k_and_v_alone() -> None:
    spec = decoder_spec(config("Qwen2ForCausalLM"))
    assert (spec.has_qkv_bias, spec.has_o_bias, spec.has_qk_norm) == (True, False, False)


def test_qwen3_norms_queries_and_keys_and_has_its_own_head_dim() -> None:
    spec = decoder_spec(config("Qwen3ForCausalLM"))
    assert (spec.has_qk_norm, spec.has_qkv_bias, spec.head_dim, spec.q_size) == (True, False, 128, 1024)


def test_mistral_without_a_word_on_windows_has_its_class_default() -> None:
    spec = decoder_spec(config("MistralForCausalLM"))
    assert (spec.windows, spec.num_kv_heads) == ((4096,) * 4, 8)
    assert decoder_spec(config("MistralForCausalLM", sliding_window=None)).windows == (None,) * 4


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_layer_types_decide_which_layers_have_the_window(architecture: str) -> None:
    """Case H5."""
    full, sliding = "full_attention", "sliding_attention"
    window = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}
    alternating = config(architecture, **window, layer_types=[full, sliding] * 2)
    assert decoder_spec(alternating).windows == (None, 7, None, 7)
    assert decoder_spec(config(architecture, **window, layer_types=[full] * 4)).windows == (None,) * 4


def test_qwen_without_layer_types_windows_the_layers_from_max_window_layers_on() -> None:
    window = {"sliding_window": 7, "max_window_layers": 3}
    on, off = (config("Qwen2ForCausalLM", **window, use_sliding_window=flag) for flag in (True, False))
    assert decoder_spec(on).windows == (None, None, None, 7)
    assert decoder_spec(off).windows == (None,) * 4


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_is_read_in_the_old_and_the_new_form(place: str, key: str) -> None:
    theta = {"rope_theta": 5e5}
    given = {key: "linear", "factor": 2, **(theta if place == "rope_parameters" else {})}
    rope = rope_of(**{place: given}, **(theta if place == "rope_scaling" else {}))
    assert rope == RopeSpec(5e5, LinearScaling(2.0))


def test_llama3_scaling_falls_back_to_the_models_own_length() -> None:
    given = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert rope_of(rope_scaling=given).scaling == Llama3Scaling(8.0, 1.0, 4.0, 512)
    given["original_max_position_embeddings"] = 128
    assert rope_of(rope_scaling=given).scaling == Llama3Scaling(8.0, 1.0, 4.0, 128)


def test_dynamic_scaling_starts_beyond_max_position_embeddings() -> None:
    assert rope_of(rope_scaling={"type": "dynamic", "factor": 4.0}).scaling == DynamicScaling(4.0, 512)


def test_yarn_derives_what_is_not_given() -> None:
    given: dict[str, object] = {"type": "yarn", "original_max_position_embeddings": 64}
    expected = YarnScaling(8.0, 64, 1.2079441541679836, 32.0, 1.0, True)
    assert rope_of(rope_scaling=given).scaling == expected
    ratio = rope_of(rope_scaling={**given, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}).scaling
    assert isinstance(ratio, YarnScaling)
    assert ratio.attention_factor == pytest.approx(1.0857, abs=1e-4)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        decoder_spec(config("GPT2LMHeadModel"))
    with pytest.raises(ValueError, match="architectures None"):
        decoder_spec(SIZES)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"'longrope'.*default, linear, dynamic, llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat map"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_key_value_heads": 3}, "8 query heads do not divide among 3"),
        ({"vocab_size": None}, "'vocab_size' is None"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is None"),
    ],
)
def test_what_the_forward_pass_cannot_do_is_refused_by_name(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_spec(config("LlamaForCausalLM", **more))
