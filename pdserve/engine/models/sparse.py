"""The feed-forwards of a mixture of experts: where its tensors are, and which layers have them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.config_section import Section
from pdserve.engine.experts import Router, SparseFeedForward
from pdserve.engine.model_config import ExpertsConfig, ModelConfig
from pdserve.engine.models.feed_forward import FeedForward, GatedFeedForward, gated_feed_forward
from pdserve.engine.models.tensors import LayerTensors, Projection, stacked
from pdserve.engine.numerics import Precision
from pdserve.modelstore.errors import BadModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Short names of a layer's tensors; {} is the expert's number."""

    router: str
    gate: str
    up: str
    down: str


class SparseFeedForwards:
    """Implements `MakeFeedForward` for one model: experts where the config says so, else one feed-forward."""

    def __init__(self, names: ExpertNames) -> None:
        self._names = names

    def __call__(self, config: ModelConfig, tensors: LayerTensors, precision: Precision) -> FeedForward:
        assert config.experts is not None
        if not config.experts.layers[tensors.index]:
            return gated_feed_forward(config, tensors, precision)
        gate = tensors.matrix(self._names.router, config.experts.num_experts, config.hidden_size)
        router = Router(precision, gate.values(), config.experts.num_chosen, config.experts.is_normalised)
        experts = [
            self._expert(number, config.hidden_size, config.experts.ffn_size, tensors, precision)
            for number in range(config.experts.num_experts)
        ]
        return SparseFeedForward(router, experts)

    def _expert(
        self, number: int, hidden: int, ffn: int, tensors: LayerTensors, precision: Precision
    ) -> GatedFeedForward:
        def matrix(name: str, rows: int, columns: int) -> Projection:
            return tensors.projection(name.format(number), rows, columns)

        part = tensors.shard.part(ffn)
        gate, up = (matrix(name, ffn, hidden).outputs(part) for name in (self._names.gate, self._names.up))
        down = matrix(self._names.down, hidden, ffn).inputs(part, adds_bias=False)
        expert = GatedFeedForward(stacked(gate, up), down, "silu", precision)
        tensors.release()  # a layer's experts together may be gigabytes
        return expert


def read_experts(
    config: Section, *, ffn_size: int, num_chosen: int, is_normalised: bool, layers: tuple[bool, ...]
) -> ExpertsConfig:
    """num_local_experts (or num_experts) and num_experts_per_tok; num_chosen is the family's default of this one.

    Raises BadModel with key and value.
    """
    key = "num_local_experts" if config.raw.get("num_local_experts") is not None else "num_experts"
    num_experts = config.integer(key)
    chosen = config.integer("num_experts_per_tok", num_chosen)
    if chosen > num_experts:
        raise BadModel(
            "a token can't choose more experts than there are",
            key="num_experts_per_tok",
            value=chosen,
            num_experts=num_experts,
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=chosen,
        ffn_size=ffn_size,
        is_normalised=is_normalised,
        layers=layers,
    )
