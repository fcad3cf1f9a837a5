"""kvpage in EleutherAI's lm-evaluation-harness, as the model "kvpage".

    python -m kvpage.evaluation.lm_eval --model kvpage \\
        --model_args pretrained=PATH,budget=1024,scorer=sampled --tasks gsm8k

is the harness's own `lm_eval` command once "kvpage" is registered there: the harness finds no
models of other packages by itself. In a script, importing this module registers it.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvpage.cache import PagedCompactCache
from kvpage.compat import NEWEST

OPTIONS = ("budget", "interval", "block_size", "sinks", "recent", "pin_prompt", "scorer")


@register_model("kvpage")
class KvpageLM(HFLM):
    """The harness's Hugging Face model under a budget.

    Takes what the harness's `hf` takes, PEFT adapters (`peft=`) included, and of
    `PagedCompactCache` the arguments `OPTIONS` (`budget=none` for the full cache).

    Generation starts with a cache of its own for every batch: the prompt is attended in full and
    compacted at the first new token. Log-likelihoods, of multiple choice and perplexity tasks, are
    those of text that went through the bounded cache `step` tokens a forward, context included,
    since within one forward nothing is evicted: `step=1` is plain decoding; with more, compactions
    come up to `step - 1` tokens early. While a text is no longer than budget + interval, both are
    the full cache's.
    """

    def __init__(self, pretrained: Any, *, step: int = 16, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        if str(options.get("budget")).lower() == "none" and "budget" in options:
            options["budget"] = None
        self.options: dict[str, Any] = options
        super().__init__(pretrained, backend=kwargs.pop("backend", "causal"), **kwargs)
        interval = self._new_cache().settings.interval
        if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= interval:
            raise ValueError(f"step: 1 to the interval, {interval}, expected, got {step!r}")
        self.step = step

    def _new_cache(self) -> PagedCompactCache:
        return PagedCompactCache(self.model, **self.options)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> Tensor:
        cache = {NEWEST: self._new_cache()}
        return super()._model_generate(context, max_length, stop, **kwargs, **cache)

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Logits `[B, T, V]` of texts `[B, T]` padded on the right, whose pads nothing looks at."""
        cache = self._new_cache()
        with torch.inference_mode():
            parts = inps.split(self.step, dim=1)
            return torch.cat([self.model(part, **{NEWEST: cache}).logits for part in parts], dim=1)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
