"""What a user does first, with nothing but the wheel and what it depends on."""

from importlib.metadata import metadata
from importlib.resources import files

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpage

assert "site-packages" in kvpage.__file__, kvpage.__file__
assert metadata("kvpage")["Version"] == kvpage.__version__
assert (files("kvpage") / "py.typed").is_file()
assert "PagedCompactCache" in metadata("kvpage").get_payload()  # the README, for PyPI

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
cache = kvpage.PagedCompactCache(budget=64, interval=16, recent=16)
ids = torch.arange(8)[None]
model.generate(input_ids=ids, max_new_tokens=120, min_new_tokens=120, cache=cache)
report = cache.report()
assert report.live_tokens <= 80 and report.blocks_freed > 0
print(report)
try:
    import kvpage.plot
except ImportError as error:
    assert "kvpage[plot]" in str(error), error
else:
    raise AssertionError("matplotlib is no dependency of the wheel")
