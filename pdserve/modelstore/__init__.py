"""The model store: names, folders and files of models become one kind of model folder (no torch).

A model folder holds `config.json` (Hugging Face keys), `tokenizer.json`, perhaps `tokenizer_config.json`,
`generation_config.json`, `chat_template.jinja`, and weights: `*.safetensors`, or `tensors.json` beside `weights.gguf`.
"""

from pdserve.modelstore.aliases import ALIASES, Alias, Package
from pdserve.modelstore.cache import default_cache_dir
from pdserve.modelstore.errors import FetchFailed
from pdserve.modelstore.fetch import fetch
from pdserve.modelstore.resolve import resolve

__all__ = ["ALIASES", "Alias", "FetchFailed", "Package", "default_cache_dir", "fetch", "resolve"]
