"""Write smollm2_golden.json beside this file: transformers' greedy tokens, in fp32 from the dequantised GGUF.

Run from the repository's root: python -m tests.data.make_golden (a few minutes on two cores).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanoserve.source import resolve
from tests.models.oracle import transformers_from_gguf, transformers_greedy

TOKENS = 24
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CHAT += "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at 100 °C, and freezes at",
    "import torch\nfrom torch import nn\n\n\nclass Attention(nn.Module):\n    def __init__(self",
    "Les trois couleurs du drapeau français sont",
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a haiku about the sea."),
    CHAT.format("List three prime numbers above 100, then explain why 91 is not prime. 😀"),
]


def main() -> None:
    from transformers import AutoTokenizer, __version__

    path = resolve("smollm2-135m").path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers_from_gguf(path)
    cases: list[dict[str, Any]] = []
    for text in PROMPTS:
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        token_ids = transformers_greedy(model, prompt_ids, TOKENS)
        print(repr(text), "->", repr(tokenizer.decode(token_ids)))
        cases.append({"text": text, "prompt_ids": prompt_ids, "token_ids": token_ids})
    head = {"file": path.name, "transformers": __version__, "dtype": "float32"}
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    content = json.dumps(head)[:-1] + ', "prompts": [\n' + lines + "\n]}\n"
    Path(__file__).with_name("smollm2_golden.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
