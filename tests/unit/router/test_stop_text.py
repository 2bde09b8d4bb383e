"""Stop strings over every way of cutting the text into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop_text import Released, StopText

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
    assert held.push(1, "xE") == Released((), "")
    assert held.push(2, "") == Released((), "")  # an incomplete character behind held text waits as well
    assert held.push(3, "y") == Released((1, 2, 3), "xEy")


def test_the_first_stop_string_in_the_text_counts_and_of_two_there_the_longer() -> None:
    assert shown(["xaby"], ["b", "a"]) == ("x", [0], True)
    assert shown(["xaby"], ["a", "ab"], include=True) == ("xab", [0], True)


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopText((), False).push(7, "text") == Released((7,), "text")


def test_before_min_tokens_nothing_stops_and_nothing_is_held() -> None:
    held = StopText(["a"], False)
    assert held.pass_through(1, "a") == Released((1,), "a")


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
