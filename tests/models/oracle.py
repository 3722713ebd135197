"""transformers as the oracle: a GGUF file through its reader, dequantiser and un-permutation, without accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def transformers_from_gguf(path: Path) -> Any:
    """The fp32 causal language model transformers makes of the file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        shape_only = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shape_only)["tensors"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert (missing, unexpected) == (tied, []) or (missing, unexpected) == ([], [])
    return model.eval()


@torch.no_grad()
def transformers_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens, each the argmax of a forward with its K/V cache."""
    generated: list[int] = []
    cache, feed = None, ids
    for _ in range(count):
        output = model(torch.tensor([feed]), cache=cache, use_cache=True)
        cache, feed = output.cache, [int(output.logits[0, -1].argmax())]
        generated += feed
    return generated
