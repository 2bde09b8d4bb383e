"""The outbox: merging, order, bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve import messages as m
from pdserve.errors import Failure
from pdserve.sampling import SampleKey, SamplingParams, TokenLogprobs
from pdserve.service.outbox import Outbox

DONE = Failure("Draining", "")


def drain(outbox: Outbox[m.Up]) -> list[m.Up]:
    taken = []
    while (message := outbox.take()) is not None:
        taken.append(message)
    return taken


def tokens(handle: int, first: int, *ids: int) -> m.Step:
    return m.Step((m.StepTokens(handle, first, ids),))


def test_steps_join_per_sequence() -> None:
    outbox: Outbox[m.Up] = Outbox()
    for n in range(3):
        outbox.put(m.Step((m.StepTokens(1, n, (n,)), m.StepTokens(2, 10 + n, (n, n)))))
    joined = m.Step(
        (
            m.StepTokens(1, 0, (0, 1, 2)),
            m.StepTokens(2, 10, (0, 0)),
        )
    )
    got = drain(outbox)
    assert len(got) == 1
    assert isinstance(got[0], m.Step)
    assert got[0].sequences[0] == joined.sequences[0]
    assert [each.handle for each in got[0].sequences] == [1, 2, 2, 2]  # 10, 11, 12 overlap: not adjoining


def test_a_lone_step_passes_as_it_is() -> None:
    outbox: Outbox[m.Up] = Outbox()
    step = tokens(1, 0, 5)
    outbox.put(step)
    assert outbox.take() is step


def test_logprobs_join_with_their_tokens() -> None:
    outbox: Outbox[m.Up] = Outbox()
    first, second = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
    outbox.put(m.Step((m.StepTokens(1, 0, (5,), (first,)),)))
    outbox.put(m.Step((m.StepTokens(1, 1, (6,), (second,)),)))
    outbox.put(m.Step((m.StepTokens(1, 2, (7,)),)))
    assert drain(outbox) == [m.Step((m.StepTokens(1, 0, (5, 6), (first, second)), m.StepTokens(1, 2, (7,))))]


def test_tokens_never_pass_a_message_of_their_sequence() -> None:
    outbox: Outbox[m.Up] = Outbox()
    outbox.put(tokens(1, 0, 5))
    outbox.put(m.Failed(2, DONE))
    outbox.put(tokens(1, 1, 6))  # joins: nothing of sequence 1 stands between
    outbox.put(tokens(2, 0, 7))  # must stay behind the failure of 2
    assert drain(outbox) == [tokens(1, 0, 5, 6), m.Failed(2, DONE), tokens(2, 0, 7)]


def test_only_the_newest_of_load_and_the_like_is_kept_and_in_its_own_place() -> None:
    outbox: Outbox[m.Up] = Outbox()
    outbox.put(m.Credits(1))
    outbox.put(m.Progress(1, m.Phase.QUEUED, 0))
    outbox.put(m.Progress(2, m.Phase.QUEUED, 0))
    outbox.put(m.Waiting(3, 0))
    outbox.put(m.Credits(2))
    outbox.put(m.Progress(1, m.Phase.RUNNING, 5))
    assert outbox.size == 4
    assert drain(outbox) == [
        m.Progress(2, m.Phase.QUEUED, 0),
        m.Waiting(3, 0),
        m.Credits(2),
        m.Progress(1, m.Phase.RUNNING, 5),
    ]
    assert outbox.size == 0
    outbox.put(m.Credits(3))
    assert drain(outbox) == [m.Credits(3)]


def test_the_bound_counts_tokens() -> None:
    outbox: Outbox[m.Up] = Outbox(limit=10)
    assert outbox.put(tokens(1, 0, *range(9)))
    assert not outbox.put(tokens(1, 9, 9))
    assert not outbox.put(m.Waiting(1, 0))
    assert outbox.size == 10
    drain(outbox)
    assert outbox.put(tokens(1, 9, 9))


def test_clear_forgets_everything() -> None:
    outbox: Outbox[m.Up] = Outbox()
    outbox.put(m.Credits(1))
    outbox.put(tokens(1, 0, 1))
    outbox.clear()
    assert not outbox
    assert outbox.take() is None
    outbox.put(m.Credits(2))
    assert drain(outbox) == [m.Credits(2)]


handles = st.integers(1, 3)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(handles, min_size=1, max_size=3, unique=True)),
        st.tuples(st.just("waiting"), handles),
        st.tuples(st.just("credits"), handles),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=60,
)


@given(operations)
def test_whatever_happens_each_sequence_keeps_its_order(given_operations: list[tuple[str, object]]) -> None:
    """Model: per handle, the tokens and the other messages come out exactly as they went in."""
    outbox: Outbox[m.Up] = Outbox()
    put: dict[int, list[object]] = {1: [], 2: [], 3: []}
    got: dict[int, list[object]] = {1: [], 2: [], 3: []}
    next_position = {1: 0, 2: 0, 3: 0}

    def note(message: m.Up | None) -> None:
        if isinstance(message, m.Step):
            for each in message.sequences:
                got[each.handle] += [(each.first_position + n, i) for n, i in enumerate(each.token_ids)]
        elif isinstance(message, m.Waiting):
            got[message.handle].append(message)

    for number, (kind, what) in enumerate(given_operations):
        if kind == "step":
            assert isinstance(what, list)
            sequences = []
            for handle in what:
                sequences.append(m.StepTokens(handle, next_position[handle], (number,)))
                put[handle].append((next_position[handle], number))
                next_position[handle] += 1
            outbox.put(m.Step(tuple(sequences)))
        elif kind == "waiting":
            assert isinstance(what, int)
            outbox.put(m.Waiting(what, number))
            put[what].append(m.Waiting(what, number))
        elif kind == "credits":
            outbox.put(m.Credits(number))
        else:
            note(outbox.take())
    for message in drain(outbox):
        note(message)
    assert got == put
    assert outbox.size == 0


def test_requests_count_by_their_tokens() -> None:
    outbox: Outbox[m.Down] = Outbox(limit=5)
    key = SampleKey(params=SamplingParams(), seed=1, choice=0, eos_token_ids=(), max_tokens=1)
    start = m.StartDecode(
        handle=1,
        token_ids=(1, 2, 3),
        num_prompt_tokens=3,
        key=key,
        deadline_left_s=1.0,
        num_strikes=0,
        source=None,
    )
    assert outbox.put(start)
    assert outbox.size == 4
    assert not outbox.put(start)
    assert outbox.put(m.Abort(1))
