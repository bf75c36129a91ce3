"""A quantised GGUF file written again in float32 is the same model."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from crossdock.benchmarks.model_export import export_float32_gguf


def write_quantised(path: Path, weights: np.ndarray) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(7)
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_are_dequantised_and_all_but_the_file_type_is_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "q8.gguf", tmp_path / "f32.gguf"
    weights = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    write_quantised(source, weights)
    export_float32_gguf(source, target)
    before, after = GGUFReader(source), GGUFReader(target)
    assert set(before.fields) - set(after.fields) == {"general.file_type"}
    assert after.fields["llama.context_length"].contents() == 128
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    (quantised,), (tensor,) = before.tensors, after.tensors
    assert tensor.tensor_type is GGMLQuantizationType.F32
    assert np.array_equal(tensor.data, dequantize(quantised.data, quantised.tensor_type))
