"""The feed-forwards of a mixture of experts: where its tensors are, and which layers have them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.config_section import Section
from pdserve.engine.experts import Expert, Router, SparseFeedForward, expert_row_padding
from pdserve.engine.model_config import BadModel, ExpertsConfig, ModelConfig
from pdserve.engine.models.feed_forward import FeedForward, gated_feed_forward
from pdserve.engine.models.tensors import LayerTensors
from pdserve.engine.numerics import Precision


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
        self._row_padding: int | None = None  # found on the first expert, since all are alike

    def __call__(self, config: ModelConfig, tensors: LayerTensors, precision: Precision) -> FeedForward:
        assert config.experts is not None
        if not config.experts.layers[tensors.index]:
            return gated_feed_forward(config, tensors, precision)
        gate = tensors.matrix(self._names.router, config.experts.num_experts, config.hidden_size)
        router = Router(gate, config.experts.num_chosen, config.experts.is_normalised)
        experts = [
            self._expert(number, config.hidden_size, config.experts.ffn_size, tensors, precision)
            for number in range(config.experts.num_experts)
        ]
        if self._row_padding is None:
            self._row_padding = expert_row_padding(experts[0], precision)
        return SparseFeedForward(router, experts, self._row_padding)

    def _expert(
        self, number: int, hidden: int, ffn: int, tensors: LayerTensors, precision: Precision
    ) -> Expert:
        expert = Expert(
            precision,
            tensors.matrix(self._names.gate.format(number), ffn, hidden),
            tensors.matrix(self._names.up.format(number), ffn, hidden),
            tensors.matrix(self._names.down.format(number), hidden, ffn),
        )
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
