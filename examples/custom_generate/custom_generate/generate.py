"""`model.generate` in a bounded KV cache: what transformers runs for `custom_generate=`."""

from typing import Any

from kvpage import PagedCompactCache
from kvpage.compat import RELEASE

CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"
OPTIONS = ("budget", "interval", "block_size", "sinks", "recent", "pin_prompt", "scorer", "stats")


def generate(model: Any, *, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
    """What `model.generate(**kwargs)` returns, in a cache that keeps `budget` live tokens.

    `OPTIONS` in kwargs are those of `kvpage.PagedCompactCache`, as are their defaults, unless the
    generation config has others under `"kvpage"`; the rest goes to the model's own `generate`.
    With `return_dict_in_generate=True` the cache comes with the result, for its `report()`.
    Raises `ValueError` for a cache, as one is made here, and for what `PagedCompactCache` refuses.
    """
    if cache is not None or past_key_values is not None:
        raise ValueError("cache: none expected with custom_generate, which makes one of its own")
    config = kwargs.get("generation_config") or model.generation_config
    options = dict(getattr(config, "kvpage", None) or {})
    options |= {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    # Of the class, as the model's own `generate` may be this function: see the README.
    return type(model).generate(model, **kwargs, **{CACHE: PagedCompactCache(model, **options)})
