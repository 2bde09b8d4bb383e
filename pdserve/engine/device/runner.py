"""The runner on a device: the same decoder over a paged pool that lies there; the host only says what is to be done.

A step's way, all of it launched at once and nothing waited for:

    tables → forward (or the replay of a graph) → head → sampler → tokens
       └ tokens of the step before, where the host doesn't know them yet ┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor

from pdserve.engine.attention import Span, begun_blocks
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.device_sampler import DeviceSampler, SampledTokens
from pdserve.engine.device.devices import Device, Mark, send
from pdserve.engine.device.kernel_choice import candidates, choose_kernels
from pdserve.engine.device.paged_attention import PagedAttention
from pdserve.engine.device.pool_size import fitting_on, pool_size
from pdserve.engine.device.step_graphs import StepGraphs
from pdserve.engine.device.step_tables import FROM_HOST, StepPlan, StepStage, StepTables
from pdserve.engine.layout import KvLayout
from pdserve.engine.model_folder import ModelFolder
from pdserve.engine.models.decoder import StepInputs
from pdserve.engine.numerics import LinearKind, Precision
from pdserve.engine.parallel.team import ALONE, Team
from pdserve.engine.port import ModelCard, Row, RowOutput, SampleSpec, sort_out
from pdserve.engine.prompt_scores import Scores, ScoreSlice, scores_of, slices_of, with_scores
from pdserve.errors import Incompatible, InvariantViolated
from pdserve.kv_memory import KvMemory
from pdserve.modelstore.progress import ByteProgress
from pdserve.sampling import SampleKey, SamplingParams

log = structlog.get_logger()

_MOST_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """outputs: of rows that failed before anything was computed; asked: which rows sample, in order; sound: which are
    computed."""

    outputs: list[RowOutput]
    sound: list[int]
    asked: list[int]
    sampled: SampledTokens | None
    scores: Scores
    mark: Mark


class DeviceRunner:
    """Implements `LaunchingRunner`. Built anywhere, then used from the engine owner's thread only (`pool` excepted)."""

    def __init__(
        self,
        model_dir: Path,
        device: Device,
        *,
        precision: Precision,
        num_blocks: int | None,
        utilization: float,
        block_size: int,
        max_step_tokens: int,
        max_batch: int,
        long_context: bool = False,
        progress: ByteProgress | None = None,
        team: Team = ALONE,
        on_loaded: Callable[[int], None] | None = None,
    ) -> None:
        """Load a model folder, run the largest step, and take what memory is left for the pool.

        precision    one with a device (`device_precision`)
        num_blocks   of the pool; None: as many as fit
        utilization  part of the device's memory that may be filled
        max_step_tokens, max_batch  as in `EngineLimits`
        team         the ranks among which the model is divided, this one of them, each on a device of its own; its
                     pool has its heads of each block
        on_loaded    told, when the weights are loaded, the bytes of a whole block; the team has met when it returns
        the others   as of `TorchRunner`
        Raises BadModel: the folder can't be served; Incompatible: it doesn't fit on the device.
        """
        self._device = device
        folder = ModelFolder.open(model_dir, long_context=long_context, progress=progress)
        with torch.inference_mode(), fitting_on(device):
            self._model = folder.decoder(precision, team)
        whole = folder.layout(precision, block_size, num_blocks=1)
        if on_loaded is not None:
            on_loaded(whole.block_bytes)
        self._team = team
        self._num_kv_heads = whole.kv_heads
        self._sampler = DeviceSampler(device)
        self._graphs: StepGraphs | None = None
        self._in_flight: list[LaunchedStep] = []
        self._last: LaunchedStep | None = None
        part = team.shard.kv_part(whole.kv_heads)
        self._layout = replace(whole, kv_heads=part.heads(whole.kv_heads))
        self._heads = folder.heads(team.shard)
        window = self._layout.blocks_for(folder.config.max_positions)
        # How many tokens an expert has is known once its router has run: no graphs, no tables wider than a step's.
        has_graphs = folder.config.experts is None
        with torch.inference_mode():
            self._make_kernels = choose_kernels(
                candidates(device, self._layout, self._heads, precision.compute),
                device,
                self._layout,
                self._heads,
                precision,
                window if has_graphs else 0,
                team.most,
            )
        self._make_pool(precision)
        self._card = replace(
            folder.card(describe_device(precision, device, self._kernels.name)),
            step_errors_are_sound=device.is_sound_after_errors,
            gpus=device.gpus,
        )
        device.forget_peak()
        with fitting_on(device):
            largest = largest_step(self._card, max_step_tokens, max_batch)
            if team.shard.rank == 0:
                self.run(largest)
            else:
                self.follow(largest, {})
        self._in_flight.clear()
        del self._pool, self._kernels, self._stage
        self._last = None
        after = device.bytes()
        here = pool_size(after, self._layout, utilization=utilization, num_blocks=num_blocks)
        fitting = -int(team.most(-here))  # what every rank has room for
        log.info(
            "engine.memory",
            device=device.name,
            weights_bytes=after.held,
            step_bytes=after.peak - after.held,
            pool_bytes=fitting * self._layout.block_bytes,
            num_blocks=fitting,
        )
        self._layout = replace(self._layout, num_blocks=fitting)
        self._make_pool(precision)
        if has_graphs:
            with torch.inference_mode():
                self._graphs = StepGraphs(
                    device,
                    self._stage,
                    self._logits_of_singles,
                    max_rows=max_batch,
                    width=min(window, fitting),
                )

    def _make_pool(self, precision: Precision) -> None:
        self._pool = DevicePool(self._layout, precision.kv, self._device)
        self._kernels = self._make_kernels(self._pool, self._heads)
        self._stage = StepStage(self._device, self._layout.block_size, self._pool.spare_block)

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def whole_layout(self) -> KvLayout:
        """Of what all ranks have: a block is the parts of them, in order of heads."""
        return replace(self._layout, kv_heads=self._num_kv_heads)

    @property
    def pool(self) -> KvMemory:
        return self._pool.memory

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """See `Runner.run`. A row with an id or block out of range fails alone, before anything is computed."""
        return self.collect(self.launch(rows))

    def launch(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> LaunchedStep:
        """See `LaunchingRunner.launch`."""
        if len(self._in_flight) == _MOST_IN_FLIGHT:
            raise InvariantViolated("too many steps in flight", most=_MOST_IN_FLIGHT)
        self._device.enter()
        outputs, sound = sort_out(rows, self._card, self._layout)
        asked = [index for index in sound if rows[index].sample is not None]
        sampled: SampledTokens | None = None
        scores: Scores = {}
        if sound:
            sources = self._sources(after or {})
            sound_rows = [rows[index] for index in sound]
            slices = slices_of(sound_rows)
            with torch.inference_mode():
                logits, hidden = self._compute(sound_rows, [sources.get(index) for index in sound], slices)
                specs = [spec for index in asked if (spec := rows[index].sample) is not None]
                if specs:
                    sampled = self._sampler.launch(logits, specs)
                scores = scores_of(slices, hidden, lambda part: self._model.logits(part).cpu())
        launched = LaunchedStep(outputs, sound, asked, sampled, scores, self._device.mark())
        self._in_flight.append(launched)
        self._last = launched
        return launched

    def collect(self, launched: LaunchedStep) -> list[RowOutput]:
        """See `LaunchingRunner.collect`."""
        if not self._in_flight or self._in_flight[0] is not launched:
            raise InvariantViolated("steps are collected in order, each once")
        self._in_flight.pop(0)
        launched.mark.wait()
        outputs = launched.outputs
        if launched.sampled is not None:
            for index, output in zip(launched.asked, launched.sampled.outputs(), strict=True):
                outputs[index] = output
        for place, given in launched.scores.items():
            index = launched.sound[place]
            outputs[index] = with_scores(outputs[index], given)
        return outputs

    def follow(self, rows: Sequence[Row], after: Mapping[int, int]) -> None:
        """See `Follower.follow`: what `launch` launches at rank 0, but for the sampler. Waits for the step before the
        last one, and raises what the device reports."""
        self._device.enter()
        sources, slices = self._sources(after), slices_of(rows)
        with torch.inference_mode():
            _, hidden = self._compute(rows, [sources.get(index) for index in range(len(rows))], slices)
            if slices:
                for part in torch.split(hidden, [len(each.positions) for each in slices]):
                    self._model.logits(part)
        asked = [index for index, row in enumerate(rows) if row.sample is not None]
        self._last = LaunchedStep([], [], asked, None, {}, self._device.mark())
        self._in_flight.append(self._last)
        if len(self._in_flight) == _MOST_IN_FLIGHT:
            self._in_flight.pop(0).mark.wait()

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """One forward pass over sound rows: what they would sample from, [rows that sample, vocabulary] float32."""
        with torch.inference_mode():
            return self._compute(rows, [None] * len(rows), [])[0].clone()

    def _sources(self, after: Mapping[int, int]) -> dict[int, int]:
        """Of rows that go on with a token of the last launched step: its place among those that it samples."""
        if not after:
            return {}
        if self._last is None:
            raise InvariantViolated("a step after none")
        places = {row: place for place, row in enumerate(self._last.asked)}
        # Behind a row that failed there is nothing to go on with: any token does.
        return {row: places.get(source, 0) for row, source in after.items()}

    def _compute(
        self, rows: Sequence[Row], sources: Sequence[int | None], scored: Sequence[ScoreSlice]
    ) -> tuple[Tensor, Tensor]:
        """Launch all rows.

        sources  of each row: where its token comes from, if the host doesn't know it
        returns  logits [rows that sample, vocabulary] float32, good until the next step; hidden states of each of
                 `scored`, one after the other
        """
        plan = _plan(rows, sources, scored)
        is_ahead = any(source is not None for source in sources)
        fill_in = self._fill_in if is_ahead else _nothing_to_fill_in
        begun = begun_blocks(plan.spans, self._layout.block_size)
        if begun:
            self._pool.begin_blocks(send(self._device, np.array(begun)))
        if self._graphs is not None and not scored and self._graphs.fits(plan):
            logits = self._graphs.run(plan, fill_in)
            return logits, logits[:0]
        shape = self._stage.natural_shape(plan)
        tables = self._stage.fill(plan, shape, self._stage.room(shape))
        fill_in(tables)
        chunks = [(row, span) for row, span in enumerate(plan.spans) if span.length > 1]
        hidden = self._hidden(tables, plan.num_single, chunks)
        num_sampled = sum(1 for row in rows if row.sample)
        return self._model.logits(hidden[:num_sampled]), hidden[num_sampled:]

    def _hidden(self, tables: StepTables, num_single: int, chunks: list[tuple[int, Span]]) -> Tensor:
        attention = PagedAttention(self._kernels, tables, num_single, chunks)
        return self._model.forward(StepInputs(tables.tokens, tables.positions, tables.wanted, attention))

    def _logits_of_singles(self, tables: StepTables) -> Tensor:
        return self._model.logits(self._hidden(tables, len(tables.ends), []))

    def _fill_in(self, tables: StepTables) -> None:
        """Put the tokens in place that the step before samples: at rank 0, whose word the others wait for."""
        last = self._last
        if last is None or not last.asked:
            return
        if last.sampled is not None:
            known = last.sampled.tokens.to(torch.int32)
        else:
            known = torch.zeros(len(last.asked), dtype=torch.int32, device=self._device.torch_device)
        known = self._team.from_first(known)
        given = known.index_select(0, tables.sources.clamp(min=0, max=len(known) - 1))
        tables.tokens.copy_(torch.where(tables.sources == FROM_HOST, tables.tokens, given))


def _nothing_to_fill_in(tables: StepTables) -> None:
    """The host knows all tokens."""


def device_precision(dtype: str, kv_dtype: str, device: Device) -> Precision:
    """Of "auto", "bfloat16" or "float32", and for the pool "auto" or "fp8", there: auto is bfloat16, and the same for
    the pool. Raises Incompatible if the device doesn't know 8-bit floats."""
    if kv_dtype == "fp8" and not device.has_fp8:
        raise Incompatible(
            "engine.kv_dtype=fp8 needs a GPU of compute capability 8.9 or later", device=device.name
        )
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    kv = torch.float8_e4m3fn if kv_dtype == "fp8" else kind
    return Precision(str(kind).removeprefix("torch."), kind, kv, LinearKind.PLAIN, device.torch_device)


def largest_step(card: ModelCard, max_step_tokens: int, max_batch: int) -> list[Row]:
    """Rows that need as much memory as any step's; all of them compute in block 0."""
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.9, logprobs=1)
    key = SampleKey(params=params, seed=0, choice=0, eos_token_ids=(), max_tokens=1)
    block_table = [0] * card.window_tokens
    chunk = min(max(1, max_step_tokens - max_batch), card.window_tokens)
    return [
        *(Row((0,), card.window_tokens - 1, block_table, SampleSpec(key, (0,), 1)) for _ in range(max_batch)),
        Row((0,) * chunk, card.window_tokens - chunk, block_table, SampleSpec(key, (0,), 1)),
    ]


def describe_device(precision: Precision, device: Device, kernels: str) -> str:
    """What the bits of results depend on; as `numerics.describe`."""
    kv = f"kv-{str(precision.kv).removeprefix('torch.')}"
    return "/".join((precision.name, kv, device.name, kernels, f"torch{torch.__version__}"))


def _plan(rows: Sequence[Row], sources: Sequence[int | None], scored: Sequence[ScoreSlice]) -> StepPlan:
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].token_ids) > 1)
    spans: dict[int, Span] = {}
    tokens: list[int] = []
    from_step: list[int] = []
    for index in order:
        row, source = rows[index], sources[index]
        spans[index] = Span(len(tokens), len(row.token_ids), row.start, row.block_table)
        tokens.extend(row.token_ids)
        from_step.extend([FROM_HOST if source is None else source] * len(row.token_ids))
    last = [spans[index].first + spans[index].length - 1 for index, row in enumerate(rows) if row.sample]
    wanted = last + [spans[each.place].first + place for each in scored for place in each.positions]
    return StepPlan(list(spans.values()), tokens, from_step, wanted)
