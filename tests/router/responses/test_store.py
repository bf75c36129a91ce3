"""What is kept of responses: how much, how long, and for whom."""

import random

from crossdock.core.config import ResponsesConfig
from crossdock.router.responses.store import TURN_BYTES, ResponseStore, Turn, turns_to

SIZE = TURN_BYTES + 10
"""Of a turn that `turn` makes."""


def turn(name: str, parent: Turn | None = None, tenant: str = "anna", at: float = 0, num_bytes: int = 10) -> Turn:
    return Turn(tenant, name, b"x" * (num_bytes - 3), b"[0]", parent, at)


def store(max_turns: int = 100, max_bytes: int = 100 * SIZE, max_seconds: float = 100) -> ResponseStore:
    return ResponseStore(ResponsesConfig(max_turns, max_bytes, max_seconds))


def kept(store: ResponseStore, *turns: Turn) -> tuple[Turn, ...]:
    for each in turns:
        store.keep(each)
    return turns


def names(store: ResponseStore, tenant: str = "anna", candidates: str = "abcdefgh") -> str:
    """Which of them can still be named, without counting as a use of any."""
    return "".join(name for name in candidates if (found := store._named.get(name)) and found.tenant == tenant)


def test_what_is_kept_is_found_by_its_tenant_alone() -> None:
    shelf = store()
    (one,) = kept(shelf, turn("a"))
    assert shelf.get("anna", "a", now=0) is one
    assert shelf.get("bert", "a", now=0) is None
    assert shelf.get("anna", "b", now=0) is None
    assert (len(shelf), shelf.num_bytes) == (1, SIZE)


def test_the_least_recently_used_goes_first_when_there_are_too_many() -> None:
    shelf = store(max_turns=3)
    kept(shelf, turn("a"), turn("b"), turn("c"))
    shelf.get("anna", "a", now=0)
    kept(shelf, turn("d"))
    assert names(shelf) == "acd"
    assert shelf.num_bytes == 3 * SIZE


def test_the_least_recently_used_go_when_there_are_too_many_bytes() -> None:
    shelf = store(max_bytes=4 * SIZE)
    kept(shelf, turn("a"), turn("b"), turn("c"), turn("d", num_bytes=10 + SIZE))
    assert names(shelf) == "bcd"
    assert shelf.num_bytes == 4 * SIZE
    kept(shelf, turn("e"))
    assert names(shelf) == "cde"


def test_what_is_old_goes_however_often_it_was_used() -> None:
    shelf = store(max_seconds=10)
    kept(shelf, turn("a", at=0), turn("b", at=5))
    assert shelf.get("anna", "a", now=10) is not None
    assert shelf.get("anna", "a", now=10.5) is None
    assert shelf.get("anna", "b", now=15) is not None
    assert (len(shelf), shelf.num_bytes) == (1, SIZE)


def test_a_tenant_with_much_loses_before_one_with_little() -> None:
    shelf = store(max_turns=4)
    kept(shelf, turn("a", tenant="bert"), turn("b"), turn("c"), turn("d"), turn("e"))
    assert (names(shelf, "bert"), names(shelf)) == ("a", "cde")
    shelf = store(max_bytes=5 * SIZE)
    kept(shelf, turn("a", tenant="bert"), turn("b", num_bytes=10 + 2 * SIZE), turn("c"), turn("d"))
    assert (names(shelf, "bert"), names(shelf)) == ("a", "cd")


def test_branches_share_what_they_have_in_common() -> None:
    shelf = store()
    (root,) = kept(shelf, turn("a"))
    one, other = kept(shelf, turn("b", root), turn("c", root))
    assert turns_to(one) == [root, one]
    assert turns_to(other) == [root, other]
    assert turns_to(None) == []
    assert shelf.num_bytes == 3 * SIZE


def test_a_turn_that_others_stand_on_cannot_be_named_after_it_is_dropped_but_is_there_and_counted() -> None:
    shelf = store()
    (root,) = kept(shelf, turn("a"))
    one, other = kept(shelf, turn("b", root), turn("c", root))
    shelf.drop(root)
    assert shelf.get("anna", "a", now=0) is None
    assert turns_to(one) == [root, one]
    assert (len(shelf), shelf.num_bytes) == (2, 3 * SIZE)
    shelf.drop(one)
    assert shelf.num_bytes == 2 * SIZE
    shelf.drop(other)
    assert (len(shelf), shelf.num_bytes) == (0, 0)


def test_a_parent_that_is_dropped_while_it_is_continued_is_counted_again() -> None:
    shelf = store()
    (root,) = kept(shelf, turn("a"))
    shelf.drop(root)
    assert shelf.num_bytes == 0
    kept(shelf, turn("b", root))
    assert (names(shelf), shelf.num_bytes) == ("b", 2 * SIZE)


def test_a_conversation_has_room_when_all_of_it_fits_whatever_else_must_go() -> None:
    shelf = store(max_bytes=3 * SIZE)
    root, _ = kept(shelf, turn("a"), turn("x"))
    (middle,) = kept(shelf, turn("b", root))
    assert shelf.has_room_for(turn("c", middle))
    assert not shelf.has_room_for(turn("c", middle, num_bytes=11))
    (last,) = kept(shelf, turn("c", middle))
    assert names(shelf, candidates="abcx") == "bc"  # the root went first, which freed nothing
    assert turns_to(last) == [root, middle, last]
    assert shelf.num_bytes == 3 * SIZE


def test_a_store_of_no_turns_has_no_room() -> None:
    assert not store(max_turns=0).has_room_for(turn("a"))


def test_books_balance_after_random_operations() -> None:
    dice = random.Random(5)
    shelf = store(max_turns=12, max_bytes=30 * SIZE, max_seconds=40)
    made: list[Turn] = []
    for now in range(600):
        tenant = dice.choice(["anna", "bert", "carl"])
        mine = [each for each in made[-30:] if each.tenant == tenant]
        match dice.randrange(4):
            case 0 if mine and (found := shelf.get(tenant, dice.choice(mine).id, now)):
                shelf.drop(found)
            case 1 if mine:
                shelf.get(tenant, dice.choice(mine).id, now)
            case _:
                parent = shelf.get(tenant, dice.choice(mine).id, now) if mine and dice.random() < 0.7 else None
                new = turn(str(now), parent, tenant, now, num_bytes=dice.randrange(10, 3000))
                if shelf.has_room_for(new):
                    shelf.keep(new)
                    made.append(new)
                    assert shelf.get(tenant, new.id, now) is new
        named = shelf._named.values()
        standing = {each.id: each for last in named for each in turns_to(last)}
        assert shelf.num_bytes == sum(each.num_bytes for each in standing.values()) <= 30 * SIZE
        assert len(named) <= 12
    assert len(made) > 300
