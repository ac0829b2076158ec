"""Search: which configs to try, and which of them is a layer's record."""

from autotune.families import Unsupported
from autotune.search.loop import tune
from autotune.search.renewal import renew
from autotune.search.result import NoValidConfig, Progress, Result
from autotune.search.space import Space

__all__ = ["NoValidConfig", "Progress", "Result", "Space", "Unsupported", "renew", "tune"]
