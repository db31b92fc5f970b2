"""Names of units: everything that changes the cache changes the name."""

from __future__ import annotations

from services.common.prefix_chain import HashChain, root_hash
from services.engine.scheduler.messages import ImageSpan

TOKENS = list(range(100, 150))


def chain(
    tokens: list[int] = TOKENS,
    *,
    fingerprint: str = "m",
    salt: str = "",
    images: tuple[ImageSpan, ...] = (),
) -> list[bytes]:
    made = HashChain(root_hash(fingerprint, salt), 16, images)
    made.extend(tokens)
    return list(made.hashes)


def test_only_full_units_have_names() -> None:
    assert [len(chain(TOKENS[:n])) for n in (0, 15, 16, 31, 32, 50)] == [0, 0, 1, 1, 2, 3]
    assert all(len(h) == 32 for h in chain())


def test_growing_step_by_step_gives_the_same_names() -> None:
    made = HashChain(root_hash("m", ""), 16)
    for n in range(len(TOKENS) + 1):
        made.extend(TOKENS[:n])
    assert made.hashes == chain()


def test_a_fork_grows_on_its_own() -> None:
    made = HashChain(root_hash("m", ""), 16)
    made.extend(TOKENS[:16])
    fork = made.fork()
    fork.extend(TOKENS)
    assert len(made.hashes) == 1 and fork.hashes == chain()
    assert fork.parent(1) == made.hashes[0] and fork.parent(0) == made.parent(0)


def test_a_name_covers_all_tokens_before_it() -> None:
    changed = [*TOKENS]
    changed[3] = 0
    assert not set(chain(changed)) & set(chain())
    changed = [*TOKENS]
    changed[20] = 0
    assert [a == b for a, b in zip(chain(changed), chain(), strict=True)] == [True, False, False]


def test_model_and_salt_separate_names() -> None:
    names = [chain(), chain(fingerprint="n"), chain(salt="m"), chain(fingerprint="", salt="m")]
    assert len({h for c in names for h in c}) == 12


def test_an_image_changes_the_units_that_it_touches_and_those_after() -> None:
    def with_image(digest: bytes, offset: int = 14) -> list[bytes]:
        return chain(images=(ImageSpan(offset, 4, digest),))

    assert not set(with_image(b"a")) & set(with_image(b"b"))
    assert not set(with_image(b"a")) & set(chain())
    late = chain(images=(ImageSpan(16, 4, b"a"),))
    assert late[0] == chain()[0] and not set(late[1:]) & set(chain())
    assert with_image(b"a", 14)[0] != with_image(b"a", 13)[0]
