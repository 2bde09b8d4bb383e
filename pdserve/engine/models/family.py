"""What a family of models does its own way; everything else is the decoder's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.config_reader import ConfigReader
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models.feed_forward import MakeFeedForward, gated_feed_forward
from pdserve.engine.models.self_attention import LoadQkv, separate_qkv


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One class name of config.json.

    configure          what its config.json means; raises BadModel
    load_qkv           where a layer's queries, keys and values are stored
    feed_forwards      makes what makes the feed-forwards of one model's layers
    """

    configure: Callable[[ConfigReader], ModelConfig]
    load_qkv: LoadQkv = separate_qkv
    feed_forwards: Callable[[], MakeFeedForward] = lambda: gated_feed_forward
