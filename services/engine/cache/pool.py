"""Ids of pages or slots: who holds them, which are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class InvariantError(Exception):
    """The books of the cache contradict each other: a defect, never a user's fault."""


class IdPool:
    """Owns the page or slot ids of one cache group. Not thread-safe; the core is the only caller.

    Every id is in exactly one state:

    =========  =====================  ===========================================
    state      holders (references)   prefix index
    =========  =====================  ===========================================
    free       0                      no; contents of no interest
    cached     0                      yes; can be evicted at any time
    used       1 or more              yes or no
    =========  =====================  ===========================================
    """

    def __init__(self, name: str, total: int, *, poison: bool = False) -> None:
        """`poison`: freed ids are filled with garbage before the next step."""
        self.name = name
        self.total = total
        self._poison = poison
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._indexed = bytearray(total)
        self._condemned: set[int] = set()  # held ids that are to be zeroed once free
        self._zero: set[int] = set()  # freed since the last step
        self._garbage: set[int] = set()
        self._cached = 0
        self._used = 0

    @property
    def free(self) -> int:
        """Ids that `take` gives out."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Ids that only the prefix index holds."""
        return self._cached

    @property
    def used(self) -> int:
        """Ids with at least one holder."""
        return self._used

    @property
    def available(self) -> int:
        """Ids that can be had: free ones, and cached ones by eviction."""
        return len(self._free) + self._cached

    def take(self, count: int) -> list[int] | None:
        """`count` free ids with one reference each, or None and nothing changes."""
        if count > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(count)]
        for i in ids:
            self._references[i] = 1
        self._used += count
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more reference on each id; all must be used or cached."""
        for i in ids:
            if not self._references[i]:
                if not self._indexed[i]:
                    raise InvariantError(f"pool {self.name}: id {i} is free and cannot be shared")
                self._cached -= 1
                self._used += 1
            self._references[i] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Give back one reference on each id."""
        for i in ids:
            if self._references[i] < 1:
                raise InvariantError(f"pool {self.name}: id {i} is released and has no holder")
            self._references[i] -= 1
            if not self._references[i]:
                self._used -= 1
                if self._indexed[i]:
                    self._cached += 1
                else:
                    self._drop(i)

    def index(self, ids: Iterable[int]) -> None:
        """The prefix index holds these used ids from now on."""
        for i in ids:
            if self._indexed[i] or not self._references[i]:
                raise InvariantError(f"pool {self.name}: id {i} cannot enter the prefix index")
            self._indexed[i] = 1

    def unindex(self, ids: Iterable[int]) -> None:
        """The prefix index holds these ids no longer."""
        for i in ids:
            if not self._indexed[i]:
                raise InvariantError(f"pool {self.name}: id {i} is not in the prefix index")
            self._indexed[i] = 0
            if not self._references[i]:
                self._cached -= 1
                self._drop(i)

    def condemn(self, ids: Iterable[int]) -> None:
        """The contents are bad: zero these used ids when they become free."""
        self._condemned.update(ids)

    def drain(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids to zero and ids to fill with garbage before the next step reads or writes them."""
        zero, garbage = tuple(sorted(self._zero)), tuple(sorted(self._garbage))
        self._zero.clear()
        self._garbage.clear()
        return zero, garbage

    def keep_contents(self, ids: Iterable[int]) -> None:
        """These ids, just taken, are written before the next step: do not clear them then."""
        self._zero.difference_update(ids)
        self._garbage.difference_update(ids)

    def is_shared(self, i: int) -> bool:
        """Whether somebody else than one holder has the id: its contents must not change."""
        return self._references[i] > 1 or bool(self._indexed[i])

    def references(self, i: int) -> int:
        """Number of holders, the prefix index not counted."""
        return self._references[i]

    def check(self, held: Sequence[int], indexed: Sequence[int]) -> None:
        """Raise where the counts differ from `held` (with repeats) and `indexed` ids."""
        references = [0] * self.total
        for i in held:
            references[i] += 1
        if references != self._references:
            wrong = [i for i in range(self.total) if references[i] != self._references[i]]
            raise InvariantError(f"pool {self.name}: wrong reference counts of ids {wrong[:8]}")
        if len(set(indexed)) != len(indexed):
            raise InvariantError(f"pool {self.name}: an id is in two places of the prefix index")
        if set(indexed) != {i for i in range(self.total) if self._indexed[i]}:
            raise InvariantError(f"pool {self.name}: index marks and index entries differ")
        self._check_states(set(held), set(indexed))

    def _check_states(self, held: set[int], indexed: set[int]) -> None:
        loose = self._free
        if (len(held), len(indexed - held)) != (self._used, self._cached):
            raise InvariantError(f"pool {self.name}: used or cached count is wrong")
        if len(loose) != len(set(loose)) or set(loose) & (held | indexed):
            raise InvariantError(f"pool {self.name}: an id is free and held, or free twice")
        if len(loose) + self._used + self._cached != self.total:
            raise InvariantError(
                f"pool {self.name}: {len(loose)} free + {self._used} used + {self._cached} cached "
                f"is not {self.total}"
            )

    def _drop(self, i: int) -> None:
        self._free.append(i)
        if i in self._condemned:
            self._condemned.discard(i)
            self._zero.add(i)
        elif self._poison:
            self._garbage.add(i)
