"""The demo model in the forms that other engines read, in float32 so that all compute the same.

Their quantised kernels would compare formats, not engines.
"""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

ABOUT_QUANTISATION = ("general.file_type", "general.quantization_version")


def export_folder(source: Path, folder: Path) -> None:
    """Write a GGUF file's model, tokenizer and chat template as Hugging Face lays them out."""
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    plain = type(loaded)(config)  # the loaded one remembers that it was quantised and refuses to be saved
    plain.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    plain.save_pretrained(folder)


def export_float32_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file again with every tensor in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in ABOUT_QUANTISATION:
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
