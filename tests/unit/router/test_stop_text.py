"""Stop strings over every way of cutting the text into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop_text import ReleasedText, StopText

LETTERS = st.text(alphabet="abX", max_size=12)


def shown(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, list[int], bool]:
    """Text and ids of all that came out, and whether a stop string ended it; ids are places in `pieces`."""
    filter_ = StopText(stops, include)
    text = ""
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        released = filter_.push(index, piece)
        text += released.text
        ids += released.token_ids
        if released.stopped:
            return text, ids, True
    rest = filter_.flush()
    return text + rest.text, ids + list(rest.token_ids), False


def test_a_stop_string_over_token_borders_is_cut_out_with_its_ids_kept() -> None:
    assert shown(["a", "ST", "O", "P", "b"], ["STOP"]) == ("a", [0, 1, 2, 3], True)
    assert shown(["a", "ST", "O", "P", "b"], ["STOP"], include=True) == ("aSTOP", [0, 1, 2, 3], True)


def test_what_may_begin_one_is_held_back_whole_tokens_at_a_time() -> None:
    held = StopText(["END"], False)
    assert held.push(1, "xE") == ReleasedText((), "")
    assert held.push(2, "") == ReleasedText((), "")  # an incomplete character behind held text waits as well
    assert held.push(3, "y") == ReleasedText((1, 2, 3), "xEy")


def test_the_first_stop_string_in_the_text_counts_and_of_two_there_the_longer() -> None:
    assert shown(["xaby"], ["b", "a"]) == ("x", [0], True)
    assert shown(["xaby"], ["a", "ab"], include=True) == ("xab", [0], True)


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopText((), False).push(7, "text") == ReleasedText((7,), "text")


def run(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, list[int], bool]:
    """As `shown`; a token before min_tokens may not end the text."""
    filter_ = StopText(stops, False)
    text = ""
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        take = filter_.pass_through if index + 1 < min_tokens else filter_.push
        released = take(index, piece)
        text += released.text
        ids += released.token_ids
        if released.stopped:
            return text, ids, True
    rest = filter_.flush()
    return text + rest.text, ids + list(rest.token_ids), False


def test_before_min_tokens_nothing_stops() -> None:
    held = StopText(["a"], False)
    assert held.pass_through(1, "a") == ReleasedText((1,), "a")
    assert held.push(2, "b") == ReleasedText((2,), "b")


def test_a_stop_string_may_begin_before_min_tokens_and_end_behind() -> None:
    pieces = ["The ", "lamp is gr", "een. Then ", "it is off."]
    for min_tokens in (0, 2, 3):
        assert run(pieces, ["green."], min_tokens) == ("The lamp is ", [0, 1, 2], True)
    assert run(pieces, ["green."], 4) == ("".join(pieces), [0, 1, 2, 3], False)


def test_a_stop_string_may_begin_in_what_another_router_has_shown() -> None:
    filter_ = StopText(["END"], False)
    filter_.push(0, "the E")
    filter_.note_shown()
    assert filter_.push(1, "N") == ReleasedText((), "")
    assert filter_.push(2, "D and") == ReleasedText((1, 2), "", stopped=True)
    other = StopText(["END"], False)
    other.push(0, "the E")
    other.note_shown()
    assert other.push(1, "N") == ReleasedText((), "")
    assert other.push(2, "T") == ReleasedText((1, 2), "NT")


@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text("abX", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 9),
)
def test_the_text_ends_at_the_first_token_that_may_end_it_and_completes_a_stop_string(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    text, ids, stopped = run(pieces, stops, min_tokens)
    whole = ""
    for end, piece in enumerate(pieces):
        before, whole = len(whole), whole + piece
        begins = [
            begin
            for stop in stops
            for begin in range(len(whole))
            if whole.startswith(stop, begin) and begin + len(stop) > before
        ]
        if begins and end + 1 >= min_tokens:
            assert stopped and text == whole[: min(begins)] and ids == list(range(end + 1))
            return
    assert not stopped and text == whole and ids == list(range(len(pieces)))


@given(
    pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text("abX", min_size=1, max_size=4), max_size=3)
)
def test_the_text_is_the_whole_up_to_the_first_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    text, ids, stopped = shown(pieces, stops)
    whole = ""
    for end, piece in enumerate(pieces):
        whole += piece
        begins = [whole.find(stop) for stop in stops if stop in whole]
        if begins:
            assert stopped and text == whole[: min(begins)] and ids == list(range(end + 1))
            return
    assert not stopped and text == whole and ids == list(range(len(pieces)))
