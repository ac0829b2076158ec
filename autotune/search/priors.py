"""What to try first: defaults, the winners of similar layers, and the predictions' favourites."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.search.space import Space
from autotune.trial import Config

if TYPE_CHECKING:
    from autotune.store import Store

_NEIGHBOURS = 4
# of the trials that go to favourites before the sampler takes over
_FAVOURITES_SHARE = 0.25
_FAVOURITES_AT_LEAST = 6


def first_proposals(
    space: Space, store: Store, problem: ConvProblem, device: DeviceSpec, trials: int, earlier: Iterable[Config] = ()
) -> list[Config]:
    """Legal configs in the order to try them.

    Defaults, the layer's record, ``earlier`` ones, winners of similar layers, favourites of the predictions.
    """
    present = store.best(problem, device)
    favourites = space.favourites(max(_FAVOURITES_AT_LEAST, math.ceil(_FAVOURITES_SHARE * trials)))
    wanted = [
        *space.defaults(),
        *([present.config] if present else []),
        *earlier,
        *(record.config for _, record in islice(store.similar(problem, device, any_epilogue=True), _NEIGHBOURS)),
        *favourites,
    ]
    return [config for config in dict.fromkeys(wanted) if config in space]
