"""Crossdock: serves large language models with prefill and decode on separate workers.

    floor 4   worker llm cli        compose: a worker process, the offline API, the commands
    floor 3   prefill   decode      one part each: policy and life cycle
              router    deploy      text and HTTP; processes and model files
    floor 2   model     kvtransfer  the network on the device; blocks between devices
    floor 1   kernels   core        device kernels; data and decisions

Imports go only downward. `docs/architecture.md` is the map, `core/messages.py` the language.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.config import EngineConfig as EngineConfig
    from .core.request import SamplingParams as SamplingParams
    from .llm import LLM as LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> object:
    """The public names, imported when first used: torch is not loaded by `import crossdock`."""
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "SamplingParams":
        from .core.request import SamplingParams

        return SamplingParams
    if name == "EngineConfig":
        from .core.config import EngineConfig

        return EngineConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
