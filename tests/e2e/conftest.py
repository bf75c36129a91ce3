"""Real processes: `crossdock serve` as a user starts it, and a small random model that Transformers can run too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from .server import Server

Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose logits lie far apart, so that greedy choices have no near ties; a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("small_model")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=319,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in "abcdefgh" for second in "stuvwxyz"]
    symbols = [*alphabet, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers that end with the test; a test that fails shows their logs."""
    servers: list[Server] = []

    def start(model: Path | str, *flags: str) -> Server:
        servers.append(Server(str(model), ("--threads", "1", *flags), tmp_path / f"server{len(servers)}.log"))
        servers[-1].wait_until_healthy()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
