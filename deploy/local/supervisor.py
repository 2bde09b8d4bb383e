"""The supervisor: keeps the processes of a plan running, says when they are ready, drains them at the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.local.child import Child
from deploy.local.output import ProcessOutput
from deploy.local.plan import ClusterPlan, ProcessSpec
from deploy.local.probe import NOTHING, Loaded, fetch_loaded, why_not_ready
from deploy.local.ready_file import ProcessRow, remove_ready_file, write_ready_file
from deploy.local.restarts import Again, GiveUp, RestartPolicy, Restarts, exit_text
from deploy.local.screen import ERROR_PREFIX, Screen
from pdserve.clock import Clock

_PROBE_S = 0.1
# What a draining child may need beyond drain_s to close its sockets.
_DRAIN_MARGIN_S = 5.0


@dataclass(slots=True)
class _Slot:
    """One process of the plan and its present incarnation.

    lacks   what it said when it wasn't ready
    loaded  how far its weights are, if it is a worker that has any
    leaves  it was told to drain and isn't started again; was_ready: in any incarnation
    """

    spec: ProcessSpec
    restarts: Restarts
    child: Child | None = None
    ready_since_s: float | None = None
    lacks: str = ""
    loaded: Loaded = NOTHING
    leaves: bool = False
    was_ready: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Event-loop thread of the main thread only (it takes the signals); one `run`.

    extra_ready   asked after all processes are ready; the ready line waits for its True
    slow_start_s  a start in which nothing moves for so long says what it waits for, again and again
    """

    def __init__(
        self,
        plan: ClusterPlan,
        *,
        policy: RestartPolicy,
        output: ProcessOutput,
        screen: Screen,
        title: str,
        ready_file: Path | None,
        drain_s: float,
        clock: Clock,
        extra_ready: Callable[[ClusterPlan], Awaitable[bool]],
        slow_start_s: float = 15.0,
    ) -> None:
        self._plan = plan
        self._output = output
        self._screen = screen
        self._title = title
        self._ready_file = ready_file
        self._drain_s = drain_s
        self._clock = clock
        self._extra_ready = extra_ready
        self._slow_start_s = slow_start_s
        self._policy = policy
        self._slots = [_Slot(spec, Restarts(policy)) for spec in plan.processes]
        self.stopping = asyncio.Event()
        self.announced = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._fault: str | None = None
        self._killed = False
        self._started_s = self._moved_s = clock.now_s()

    async def run(self) -> str | None:
        """Start everything and serve until a signal has drained it; returns what went wrong, or None."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with self._group as group:
                for slot in self._slots:
                    group.create_task(self._keep(slot))
                group.create_task(self._announce())
                group.create_task(self._drain())
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if self._ready_file is not None:
                remove_ready_file(self._ready_file)
        return self._fault

    # --- more workers, and fewer

    def add(self, spec: ProcessSpec) -> None:
        """Start one more process and keep it running, as those of the plan are. Not while everything stops."""
        if self.stopping.is_set():
            return
        slot = _Slot(spec, Restarts(self._policy))
        self._slots.append(slot)
        self._group.create_task(self._keep(slot))

    def remove(self, worker_id: str) -> None:
        """Let a worker drain, and don't start it again; no error if it has gone already."""
        for slot in self._slots[1:]:
            if slot.spec.id == worker_id and not slot.leaves:
                slot.leaves = True
                if slot.ended.is_set():  # it was given up
                    self._slots.remove(slot)
                else:
                    self._group.create_task(self._end([slot]))

    def replace(self, spec: ProcessSpec) -> None:
        """Start the worker of this id in this way, should it have to be started again."""
        for slot in self._slots[1:]:
            if slot.spec.id == spec.id:
                slot.spec = spec

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Of all that there are, those included that drain."""
        return tuple(slot.spec.id for slot in self._slots[1:])

    def _on_signal(self) -> None:
        if not self.stopping.is_set():
            self.stopping.set()
            self._screen.tell(f"draining, at most {self._drain_s:g} s; Ctrl-C again ends everything now")
            return
        self._killed = True
        self._fault = self._fault or "ended before everything was drained"
        for slot in self._slots:
            if slot.child is not None:
                slot.child.kill()

    def _fail(self, reason: str) -> None:
        self._fault = self._fault or reason
        self.stopping.set()

    # --- one process

    async def _keep(self, slot: _Slot) -> None:
        """Start the process, and again whenever it ends, until everything stops."""
        try:
            while self._is_wanted(slot):
                try:
                    code, ready_s, last_line = await self._run_once(slot)
                except OSError as error:
                    self._give_up(slot, f"{slot.spec.id} can't be started: {error}")
                    return
                if self.stopping.is_set():
                    # Of one that has never served, a stop at any point is good.
                    if ready_s is not None and code not in (0, -signal.SIGKILL if self._killed else 0):
                        self._screen.tell(f"{slot.spec.id} {exit_text(code)} while draining")
                    return
                if slot.leaves:
                    self._screen.tell(
                        f"{slot.spec.id} has gone" + (f": it {exit_text(code)}" if code else "")
                    )
                elif not await self._goes_on(slot, code, ready_s, last_line):
                    return
        finally:
            slot.ended.set()
            if slot.leaves:
                self._slots.remove(slot)
                self._write_ready_file()

    def _is_wanted(self, slot: _Slot) -> bool:
        return not self.stopping.is_set() and not slot.leaves

    async def _goes_on(self, slot: _Slot, code: int, ready_s: float | None, last_line: str) -> bool:
        """Whether the child is to be started again; returns when it is time to."""
        name = slot.spec.id
        said = f"; it said: {last_line.removeprefix(ERROR_PREFIX)}" if last_line else ""
        match slot.restarts.after_exit(code, ready_s):
            case Again(delay_s, num_in_a_row):
                often = f", {num_in_a_row} times in a row" if num_in_a_row > 1 else ""
                why = said if last_line.startswith(ERROR_PREFIX) else ""
                again = f"starting it again in {delay_s:g} s"
                self._screen.tell(f"{name} {exit_text(code)}{often}{why}; {again}")
                await self.pause(delay_s)
                return True
            case GiveUp(reason):
                self._give_up(slot, f"{name} {exit_text(code)}: {reason}{said}")
                return False

    def _give_up(self, slot: _Slot, told: str) -> None:
        if self.announced.is_set() and slot is not self._slots[0]:
            self._screen.tell(f"{told}; it is not started again, the others go on")
            self._write_ready_file()
        else:  # it can't become what was asked for, or nobody could reach the rest
            self._fail(told)

    async def _run_once(self, slot: _Slot) -> tuple[int, float | None, str]:
        """One incarnation: exit status, seconds it was ready (None = never), the last line it wrote."""
        name = slot.spec.id
        child = await Child.start(slot.spec)
        slot.child, slot.ready_since_s = child, None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child.pass_on_output(lambda text: self._output.line(name, text)))
                probe = group.create_task(self._await_ready(slot))
                if not self._is_wanted(slot):  # asked to stop while it was being started
                    child.terminate()
                code = await child.wait()
                probe.cancel()
                child.kill_rest()
        finally:
            child.kill()
            since_s, slot.child, slot.ready_since_s = slot.ready_since_s, None, None
        return code, None if since_s is None else self._clock.now_s() - since_s, child.last_line

    async def _await_ready(self, slot: _Slot) -> None:
        started_s = self._clock.now_s()
        while (lacks := await why_not_ready(slot.spec.metrics)) is not None:
            slot.lacks = lacks
            await self._look_at_load(slot)
            await self.pause(_PROBE_S)
            if self.stopping.is_set():
                return
        await self._look_at_load(slot)  # it may have loaded all between two looks
        assert slot.child is not None
        slot.ready_since_s = self._clock.now_s()
        if self.announced.is_set():
            self._write_ready_file()
            again = "is back" if slot.was_ready else "is here"
            self._screen.say(f"{slot.spec.id} {again} (pid {slot.child.pid})")
            slot.was_ready = True
            return
        slot.was_ready = True
        slot.loaded = replace(slot.loaded, num_bytes=slot.loaded.total_bytes)
        self._screen.tell(f"{slot.spec.id} is ready, in {slot.ready_since_s - started_s:.1f} s")
        if all(each.ready_since_s is not None for each in self._slots):
            self._screen.loading(())

    async def _look_at_load(self, slot: _Slot) -> None:
        if slot.spec.has_weights and not self.announced.is_set():
            before, slot.loaded = slot.loaded, await fetch_loaded(slot.spec.metrics) or slot.loaded
            if slot.loaded != before:
                self._moved_s = self._clock.now_s()
            self._screen.loading([each.loaded for each in self._slots if each.spec.has_weights])

    async def pause(self, delay_s: float) -> None:
        """Wait so long, or until everything stops."""
        try:
            async with asyncio.timeout(delay_s):
                await self.stopping.wait()
        except TimeoutError:
            return

    # --- all of them

    async def _announce(self) -> None:
        """Write the ready file and say the one line, once all processes are ready and a request would be served."""
        while not self.stopping.is_set():
            waiting = [_waiting_for(slot) for slot in self._slots if slot.ready_since_s is None]
            if not waiting and await self._extra_ready(self._plan):
                self.announced.set()
                self._write_ready_file()
                took_s = self._clock.now_s() - self._started_s
                http = f" and {self._plan.http}" if self._plan.http else ""
                self._screen.say(
                    f"pdserve is ready at {self._plan.target}{http}: {self._title}, in {took_s:.1f} s"
                )
                return
            if self._clock.now_s() - self._moved_s >= self._slow_start_s:
                self._moved_s = self._clock.now_s()
                self._screen.tell(f"still waiting for {', '.join(waiting) or 'a link between the workers'}")
            await self.pause(_PROBE_S)

    def _write_ready_file(self) -> None:
        if self._ready_file is None:
            return
        rows = [
            ProcessRow(slot.spec.role, slot.spec.id, slot.child.pid, slot.spec.metrics)
            for slot in self._slots
            if slot.child is not None
        ]
        try:
            write_ready_file(self._ready_file, self._plan, rows)
        except OSError as error:
            self._fail(f"the ready file can't be written: {error}")

    async def _drain(self) -> None:
        """When everything stops: the router first, since its streams need the workers; then these."""
        await self.stopping.wait()
        self._screen.loading(())
        await self._end(self._slots[:1])
        await self._end(self._slots[1:])

    async def _end(self, slots: list[_Slot]) -> None:
        for slot in slots:
            if slot.child is not None:
                slot.child.terminate()
        try:
            async with asyncio.timeout(self._drain_s + _DRAIN_MARGIN_S):
                for slot in slots:
                    await slot.ended.wait()
        except TimeoutError:
            for slot in slots:
                if slot.child is not None:
                    self._screen.tell(f"{slot.spec.id} has not drained in time; killing it")
                    slot.child.kill()


def _waiting_for(slot: _Slot) -> str:
    return f"{slot.spec.id} ({slot.lacks})" if slot.lacks else slot.spec.id
