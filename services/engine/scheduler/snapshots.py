"""At which positions a sequence leaves snapshots of its window and state groups.

============================  =====================================  =====================
position, a unit boundary     why                                    kept after the turn
============================  =====================================  =====================
last one of the prompt        the same prompt again; next turns      yes
end of a known chain          another prompt branched off there      yes
multiple of the interval      prompts that share a part              yes
last one of the output        the next turn; replaced as it grows    at the end of the turn
============================  =====================================  =====================
"""

from __future__ import annotations

from services.engine.cache.prefix import Match
from services.engine.config import CoreConfig
from services.engine.scheduler.sequence import Sequence


def kept_targets(sequence: Sequence, match: Match, unit_tokens: int) -> set[int]:
    """Positions that an admitted sequence will pass and whose snapshot is kept.

    The last prompt token is always computed again, so the last useful boundary lies before it.
    """
    last = sequence.boundary(len(sequence.tokens) - 1)
    wanted = {last, sequence.boundary(match.chain * unit_tokens)}
    return {p for p in wanted if p > match.units * unit_tokens}


def keeps_snapshot(config: CoreConfig, sequence: Sequence, position: int) -> bool:
    """Whether the snapshot at a unit boundary outlives the turn."""
    interval = config.prefix_cache_retention_interval
    return position in sequence.targets or (interval > 0 and position % interval == 0)


def wants_snapshot(config: CoreConfig, sequence: Sequence, position: int) -> bool:
    """Whether a snapshot is taken at this position."""
    if not config.enable_prefix_caching or sequence.boundary(position) != position:
        return False
    is_output = position >= sequence.turn_start
    return is_output or keeps_snapshot(config, sequence, position)
