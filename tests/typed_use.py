"""How a typed program uses kvpage: mypy checks it as it stands, and against the built wheel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import kvpage


def oldest_go(tokens: kvpage.LiveTokens) -> Tensor:
    return tokens.positions.float()


def use(model: nn.Module) -> dict[str, object]:
    cache = kvpage.PagedCompactCache(model, budget=None, scorer=oldest_go, stats="file.safetensors")
    twins = cache.fork(2)
    assert_type(twins, list[kvpage.PagedCompactCache])
    cache.pin(0, 4)
    cache.batch_select_indices(torch.tensor([0]))
    assert_type(cache.get_seq_length(), int)
    assert_type(cache.live_positions(0), Tensor)
    report = cache.report()
    assert_type(report, kvpage.Report)
    assert_type(report.blocks_freed, int)
    assert_type(report.drift, float | None)
    statistics = kvpage.CalibratedStatistics.load("file.safetensors", model)
    assert_type(statistics.tokens, int)
    assert_type(kvpage.BlockMap.of(cache).used_blocks, int)
    kvpage.register()
    kvpage.attach(model)
    kvpage.detach(model)
    return report.to_dict()
