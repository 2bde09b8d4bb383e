"""Which rows of docs/reliability.md ("What happens when something breaks") a run met, in which phases of requests."""

from __future__ import annotations

from collections import Counter

from tests.simulation.kinds import PHASES, Kind, Moment

ROWS = {
    1: "client cancels, deadline passes",
    2: "bad request",
    3: "P dies or refuses, nothing offered",
    4: "P dies after READY",
    5: "P dies unheard after the hand-off",
    6: "D dies before CONFIRM",
    7: "D dies while streaming",
    8: "link stalls or breaks",
    9: "worker stopped and continued",
    10: "corrupt bytes",
    11: "worker restarts",
    12: "two processes with one id",
    13: "router dies",
    14: "session reset",
    15: "engine hangs",
    16: "engine step raises",
    17: "one row fails",
    18: "decode pool full in mid-run",
    19: "overload",
    20: "no P or no D alive",
    21: "incompatible worker joins",
    22: "slow client",
    23: "drain",
}

_Q, _G, _P, _C, _S, _D = PHASES

POSSIBLE: dict[int, tuple[Moment, ...]] = {
    **dict.fromkeys(ROWS, PHASES),
    2: (),
    3: (_Q, _G, _D),
    4: (_P, _C, _D),
    5: (_S, _D),
    6: (_Q, _G, _P, _C, _D),
    7: (_S, _D),
    10: (_P, _C, _D),
    16: (_G, _P, _S, _D),
    17: (_G, _P, _S, _D),
    18: (_G, _P, _S, _D),
    19: (_Q,),
    20: (_Q,),
    22: (_S,),
}
"""The phases in which a row can occur at all."""

WHY_NOT = {
    2: "refused before anything is reserved: such a request is in no phase",
    3: "with something offered it is row 4; what streams has been confirmed: row 5",
    4: "READY begins the pulling; what streams has been confirmed: row 5",
    5: "before CONFIRM it is row 3 or 4",
    6: "what streams has been confirmed: row 7",
    7: "before CONFIRM it is row 6",
    10: "bytes cross a link only while they are pulled; COMMIT may overtake the last of them",
    16: "only a request in the batch is concerned: its prompt is computed (granted or pulling), or it streams",
    17: "as 16",
    18: "who waits holds no blocks; what is committed isn't revoked",
    19: "an overloaded worker or router lets wait, or refuses; what has begun goes on. A draining one refuses as 23",
    20: "what is granted or runs has its workers; without them it is row 3, 6 or 7 and waits in the queue again",
    22: "before the first token nothing can lie unread; in a replay it is the same buffer",
}
"""Why the other phases of these rows can't occur."""

AIMS: tuple[tuple[Kind, Moment], ...] = (
    *((Kind.CANCEL, moment) for moment in PHASES),
    *((Kind.KILL_PREFILL, moment) for moment in (_Q, _G, _P, _C, _D, _D, _D)),
    *((Kind.KILL_DECODE, moment) for moment in (_Q, _G, _P, _C, _S, _D)),
    *((Kind.KILL_UNHEARD, moment) for moment in (_S, _S, _D, _D)),
    *((Kind.CUT_LINK, moment) for moment in PHASES),
    *((Kind.LINK_DIES, moment) for moment in (_G, _P, _C, _S)),
    *((Kind.NOISY_LINK, moment) for moment in (_G, _P)),
    *((Kind.STOP_PREFILL, moment) for moment in (_Q, _G, _P, _C, _D)),
    *((Kind.STOP_DECODE, moment) for moment in PHASES),
    *((Kind.CORRUPT, moment) for moment in (_P, _P, _C, _D)),
    *((Kind.TWIN_PREFILL, moment) for moment in (_Q, _G, _P, _C, _D)),
    *((Kind.TWIN_DECODE, moment) for moment in PHASES),
    *((Kind.KILL_ROUTER, moment) for moment in PHASES),
    *((Kind.RESET_WORKER, moment) for moment in PHASES),
    *((Kind.RESET_ROUTER, moment) for moment in (_Q, _C, _S)),
    *((Kind.CUT_SESSION, moment) for moment in (_G, _P, _C, _S)),
    *((Kind.HANG_PREFILL, moment) for moment in (_G, _P, _C, _D)),
    *((Kind.HANG_DECODE, moment) for moment in PHASES),
    *((Kind.FAIL_STEP_PREFILL, moment) for moment in (_G, _P, _D)),
    *((Kind.FAIL_STEP_DECODE, moment) for moment in (_S, _D)),
    *((Kind.FAIL_ROW_PREFILL, moment) for moment in (_G, _P, _D)),
    *((Kind.FAIL_ROW_DECODE, moment) for moment in (_S, _D)),
    (Kind.NO_PREFILL, Moment.ANY),
    (Kind.NO_DECODE, Moment.ANY),
    *((Kind.STRANGER, moment) for moment in PHASES),
    *((Kind.DEAF_CLIENT, moment) for moment in (_S, _S)),
    *((Kind.DRAIN_PREFILL, moment) for moment in (_Q, _G, _P, _C)),
    *((Kind.DRAIN_DECODE, moment) for moment in (*PHASES, _S, _S, _S, _S)),
    (Kind.DRAIN_ROUTER, _Q),
    (Kind.DRAIN_ROUTER, _S),
    (Kind.SWITCH_ROLE, _P),
    (Kind.SWITCH_ROLE, _S),
    (Kind.SLOW, _P),
    (Kind.SLOW, _S),
    (Kind.JOIN, Moment.ANY),
)
"""What faults are aimed at. Seed after seed takes the next as its first one, and draws the others from all."""


class Coverage:
    """(row, phase) -> how often a row befell a request in a phase; phase ANY: how often it befell anybody."""

    def __init__(self) -> None:
        self.cells: Counter[tuple[int, Moment]] = Counter()

    def add(self, row: int, *phases: Moment) -> None:
        """The row struck once; requests were in these phases (those that can't occur are no more than bystanders)."""
        self.cells[row, Moment.ANY] += 1
        for phase in dict.fromkeys(phases):
            if phase in POSSIBLE[row]:
                self.cells[row, phase] += 1

    def merge(self, other: Coverage) -> None:
        """Add another run's."""
        self.cells.update(other.cells)

    def missing(self, least: int) -> list[str]:
        """The cells that were met less often than that."""
        return [
            f"row {row} ({name}), {phase.value}: {self.cells[row, phase]}"
            for row, name in ROWS.items()
            for phase in (Moment.ANY, *POSSIBLE[row])
            if self.cells[row, phase] < least
        ]

    def __str__(self) -> str:
        head = " ".join(f"{phase.value:>9}" for phase in (Moment.ANY, *PHASES))
        lines = [f"{'row':<40} {head}"]
        for row, name in ROWS.items():
            counts = [str(self.cells[row, phase]) for phase in (Moment.ANY, *PHASES)]
            possible = (Moment.ANY, *POSSIBLE[row])
            shown = [
                count if phase in possible else "-"
                for count, phase in zip(counts, (Moment.ANY, *PHASES), strict=True)
            ]
            lines.append(f"{row:>2} {name:<37} " + " ".join(f"{each:>9}" for each in shown))
        return "\n".join(lines)
