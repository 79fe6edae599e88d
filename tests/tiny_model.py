"""A random model with a tokenizer, as a folder that commands can load."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers


def save_tiny_model(folder: Path) -> Path:
    """A random Qwen2 of two layers whose tokens are bytes, with a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "<end>"])}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    # The library has no types for it.
    kind: Any = transformers.PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}User: {{ m.content }}\nA: {% endfor %}"
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=vocabulary["<end>"],
        bos_token_id=None,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
