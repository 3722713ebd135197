"""nanoserve: an LLM inference engine and streaming server. `LLM` and `SamplingParams` are the offline API.

Exports are lazy: `import nanoserve` must cost nothing, since the server binds its port before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.request import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nanoserve.probe import share_cores

        share_cores()
        from nanoserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from nanoserve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
