"""The rule of a prefix hit over cache groups: one definition for the store and its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["paged", "window", "state"]


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group of a client and its part in a hit.

    paged: every unit of the prefix. window: the last `window_units`. state: the last unit alone.
    """

    group_id: int
    name: str
    kind: GroupKind
    window_units: int
    object_bytes: int

    def needed(self, hit_units: int) -> range:
        """Units that a hit of `hit_units` reads from this group."""
        match self.kind:
            case "paged":
                return range(hit_units)
            case "window":
                return range(max(0, hit_units - self.window_units), hit_units)
            case "state":
                return range(max(0, hit_units - 1), hit_units)


def longest_hit(groups: Sequence[Group], units: int, present: Callable[[Group, int], bool]) -> int:
    """Largest L <= `units` such that each group holds all of `needed(L)`; 0 without groups.

    Paged groups bound L from above; from there downwards the first L at which every window and
    state group is complete wins.
    """
    if not groups:
        return 0
    for group in groups:
        if group.kind == "paged":
            units = next((u for u in range(units) if not present(group, u)), units)
    others = [g for g in groups if g.kind != "paged"]
    while units and not all(present(g, u) for g in others for u in reversed(g.needed(units))):
        units -= 1
    return units
