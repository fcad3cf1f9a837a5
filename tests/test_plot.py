"""What pictures show, against the numbers of the caches they are of."""

import io
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calibrated import MODULES, captured
from helpers import Text, small_cache
from tiny import build, cache_name, generate, prompt

pytest.importorskip("matplotlib")
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image

from kvpage import BlockMap, CalibratedStatistics, PagedCompactCache, calibrate, plot
from kvpage.plot.style import BLUE, PAPER
from kvpage.rope import Rope

EVICTING = {"budget": 40, "interval": 16, "recent": 8}


@pytest.fixture(scope="module")
def model():
    return build("llama-gqa3-tied")


@pytest.fixture(scope="module")
def run(model):
    """A cache that has evicted most of two rows, and the ids `[2, 121]`."""
    cache = PagedCompactCache(model, **EVICTING)
    ids, _ = generate(model, prompt(20, batch=2), cache, 101)
    return cache, ids


def texts(figure):
    """All that is written in a figure."""
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    found += [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center")]
    found += [text.get_text() for legend in figure.legends for text in legend.texts]
    return [text for text in found if text]


def pixels(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def drawn_slots(axes):
    """The sorted token positions drawn live, and the number of slots drawn empty."""
    empty, live = axes.collections[:2]
    return sorted(live.get_array().compressed().astype(int).tolist()), empty.get_array().count()


def outlined(axes, label):
    return sum(len(c.get_paths()) for c in axes.collections if c.get_label() == label)


# The block map.


def scattered_and_compacted(blocks=30, size=16):
    """Every tenth token of a full pool, where it was and moved forward."""
    kept = torch.arange(0, blocks * size, 10)
    scattered = torch.full((blocks * size,), -1)
    scattered[kept] = kept
    compacted = torch.full((blocks * size,), -1)
    compacted[: len(kept)] = kept
    return [BlockMap.of_slots(slots.view(blocks, size)) for slots in (scattered, compacted)]


def test_a_block_map_draws_every_live_and_every_empty_slot(run):
    cache, _ = run
    for layer_idx, head in [(0, 0), (2, 1)]:
        axes = plot.block_map(cache, layer_idx, head).axes[0]
        live = cache.live_positions(layer_idx)[:, head]
        drawn, empty = drawn_slots(axes)
        assert drawn == sorted(live[live >= 0].tolist())
        report = cache.report()
        assert len(drawn) + empty == 16 * report.blocks_used
        assert outlined(axes, "free") == report.blocks_free
        for row, table in enumerate(cache.ledger.tables):
            assert outlined(axes, f"row {row}") == len(table)
    assert not torch.equal(cache.live_positions(0)[:, 0], cache.live_positions(2)[:, 1])
    first = drawn_slots(plot.block_map(cache).axes[0])
    assert first == drawn_slots(plot.block_map(cache, 0, 0).axes[0])


def test_a_slot_is_drawn_where_it_lies():
    slots = torch.arange(5 * 8).view(5, 8)
    slots[1, 3], slots[4] = -1, -1
    axes = plot.block_map(BlockMap.of_slots(slots)).axes[0]
    array = axes.collections[1].get_array()
    width, height, across = 4, 2, 3  # a block of 8 slots; blocks in a line
    assert array.shape == (2 * (height + 1), across * (width + 1))
    for block in range(5):
        for slot in range(8):
            y, x = block // across * (height + 1), block % across * (width + 1)
            drawn = array[y + slot // width, x + slot % width]
            expected = slots[block, slot]
            assert (drawn is np.ma.masked) if expected < 0 else (drawn == expected)


def test_panels_side_by_side_show_that_compaction_frees_what_scattered_eviction_does_not():
    scattered, compacted = scattered_and_compacted()
    figure = plot.block_map([scattered, compacted], title=["Evicted", "Compacted $a$ $"])
    (left, _), (right, _) = (drawn_slots(axes) for axes in figure.axes[:2])
    assert left == right == list(range(0, 480, 10))
    written = texts(figure)
    assert {"Evicted", "Compacted $a$ $"} <= set(written)
    assert "30 of 30 blocks used, 0 free" in written
    assert "3 of 30 blocks used, 27 free" in written
    assert "48 live slots: 10% of those in used blocks" in written
    assert "48 live slots: 100% of those in used blocks" in written
    one, other = (axes.collections[1].norm for axes in figure.axes[:2])
    assert (one.vmin, one.vmax) == (other.vmin, other.vmax) == (0, 470)
    pixels(figure)


def test_blocks_of_several_tables_are_outlined_and_those_of_forks_alone_hatched():
    text, cache = Text(80), small_cache()
    text.feed(cache, 40)
    (twin,) = cache.fork(1)
    figure = plot.block_map(cache)
    assert outlined(figure.axes[0], "shared") == 3
    assert "shared block" in texts(figure)
    assert any("(3 shared)" in text for text in texts(figure))
    text.feed(cache, 30)
    figure = plot.block_map(twin)
    counts, own = torch.tensor(twin.ledger.pool.ref_counts), torch.tensor(twin.ledger.tables[0])
    assert outlined(figure.axes[0], "shared") == int((counts[own] > 1).sum()) == 2
    alone = int((counts > 0).sum()) - len(own)
    assert outlined(figure.axes[0], "of forks") == alone == 3
    assert "held by forks alone" in texts(figure)
    used = int((counts > 0).sum())
    kinds, free = "2 shared, 3 by forks alone", len(counts) - used
    expected = f"{used} of {len(counts)} blocks used ({kinds}), {free} free"
    assert expected in texts(figure)
    assert f"40 live slots: {40 / 48:.0%} of those in used blocks" in texts(figure)


def test_what_no_block_map_can_be_drawn_of_is_named(run):
    cache, _ = run
    one, other = scattered_and_compacted()[0], scattered_and_compacted(size=8)[0]
    for match, arguments in [
        ("nothing was cached yet", (small_cache(),)),
        ("layer of full attention", (cache, 7)),
        ("kv_head: within", (cache, 0, 2)),
        ("layer_idx, kv_head: a cache expected", (one, 1)),
        ("layer_idx, kv_head: a cache expected", (one, None, 1)),
        (r"blocks of one size expected, got sizes \[8, 16\]", ([one, other],)),
        ("blocks of one size", ([],)),
        ("title: one for each of 2", ([one, one], None, 0, "both")),
        ("title: one for each of 2", ([one, one], None, 0, ["a"])),
    ]:
        with pytest.raises(ValueError, match=match):
            plot.block_map(*arguments)
    with pytest.raises(TypeError, match="a cache or a BlockMap expected, got int"):
        plot.block_map(3)


# Over decoded tokens.


@pytest.fixture(scope="module")
def histories():
    """What caches of two budgets went through, one token at a time."""
    found = []
    for budget in (64, 40):
        text, cache = Text(200), small_cache(budget=budget)
        names = "seen_tokens", "live_tokens", "blocks_used", "blocks_freed", "num_blocks"
        history = SimpleNamespace(**{name: [] for name in names})
        text.feed(cache, 20)
        for _ in range(150):
            text.feed(cache, 1)
            report = cache.report().to_dict()
            report["num_blocks"] = report["blocks_used"] + report["blocks_free"]
            for name in names:
                getattr(history, name).append(report[name])
        found.append(history)
    return found


def test_live_tokens_are_drawn_beside_those_of_a_full_cache(histories):
    one, other = histories
    (axes,) = plot.live_tokens(one).axes
    seen, live = axes.lines
    assert list(seen.get_xdata()) == list(live.get_xdata()) == list(range(1, 151))
    assert list(seen.get_ydata()) == list(range(21, 171))
    assert list(live.get_ydata()) == one.live_tokens and max(one.live_tokens) == 96
    figure = plot.live_tokens([one, other], ["64", "40"], budget=64)
    seen, first, second, line = figure.axes[0].lines  # the same tokens were seen: one line
    assert list(first.get_ydata()) == one.live_tokens
    assert list(second.get_ydata()) == other.live_tokens
    assert list(line.get_ydata()) == [64, 64]
    assert texts(figure) == [
        "seen tokens: a full cache", "live tokens, 64", "live tokens, 40", "budget: 64"
    ]  # fmt: skip
    assert first.get_color() != second.get_color()


def test_blocks_used_and_freed_are_drawn_one_above_the_other(histories):
    one, other = histories
    upper, lower = plot.blocks_freed(one).axes
    assert [list(line.get_ydata()) for line in upper.lines] == [one.num_blocks, one.blocks_used]
    assert list(lower.lines[0].get_ydata()) == one.blocks_freed and one.blocks_freed[-1] > 0
    figure = plot.blocks_freed([one, other], labels=["64", "40"])
    assert [list(line.get_ydata()) for line in figure.axes[1].lines] == [
        one.blocks_freed, other.blocks_freed
    ]  # fmt: skip
    assert "blocks used, 40" in texts(figure) and "blocks of the pool, 64" in texts(figure)


@pytest.mark.parametrize("draw", [plot.live_tokens, plot.blocks_freed])
def test_histories_need_tokens_and_names(draw, histories):
    with pytest.raises(ValueError, match="history: one with a decoded token"):
        draw(SimpleNamespace(seen_tokens=[]))
    with pytest.raises(ValueError, match="history"):
        draw([])
    with pytest.raises(ValueError, match="labels: a name for each of 2"):
        draw(histories)
    for labels in (["one"], "64"):
        with pytest.raises(ValueError, match="labels: 2 names expected"):
            draw(histories, labels)


# Survivors.


def kept_directly(cache, layers, row, columns):
    """bool `[heads, columns]`, one position after the other."""
    lines = [head for layer in layers for head in cache.live_positions(layer)[row].tolist()]
    return np.array([[position in line for position in range(columns)] for line in lines])


@pytest.mark.parametrize(("layers", "row"), [(None, 0), ([2, 0], 1)])
def test_survivors_show_which_positions_each_head_keeps(run, layers, row):
    cache, _ = run
    figure = plot.survivors(cache, layers=layers, row=row)
    expected = kept_directly(cache, layers or [0, 1, 2], row, 120)
    kept = figure.axes[0].images[0].get_array()
    assert np.array_equal(kept, expected)
    share = figure.axes[1].patches[0].get_data()
    assert np.allclose(share.values, expected.mean(axis=0)) and share.edges[0] == -0.5
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [str(layer) for layer in layers or [0, 1, 2]]
    heads, live = 6 if layers is None else 4, cache.report().live_tokens
    title = (
        f"{live} of 120 tokens live in each of {heads} KV heads of {heads // 2} layers, row {row}"
    )
    assert texts(figure) == [title]
    assert to_hex(figure.axes[0].images[0].cmap(1.0)) == BLUE.lower()
    assert texts(plot.survivors(cache, title="Mine"))[0] == "Mine"


def test_of_a_long_text_neighbours_share_a_cell(run, monkeypatch):
    cache, _ = run
    monkeypatch.setattr("kvpage.plot.survival.CELLS", 17)  # of 120 tokens: cells of 8
    kept = kept_directly(cache, [0, 1, 2], 0, 120)
    image = plot.survivors(cache).axes[0].images[0]
    assert np.allclose(image.get_array(), kept.reshape(6, 15, 8).mean(axis=2))
    assert list(image.get_extent()) == [-0.5, 119.5, 5.5, -0.5]
    monkeypatch.setattr("kvpage.plot.survival.CELLS", 11)  # cells of 11, and a last one of 10
    image = plot.survivors(cache).axes[0].images[0]
    assert np.allclose(image.get_array()[:, -1], kept[:, 110:].mean(axis=1))
    assert image.get_extent()[1] == 120.5


def test_pads_are_no_columns(model):
    cache = PagedCompactCache(model, **EVICTING)
    ids, mask = prompt(12, batch=2), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    generate(model, ids, cache, 9, attention_mask=mask)
    for row, columns in ((0, 20), (1, 15)):
        kept = plot.survivors(cache, row=row).axes[0].images[0].get_array()
        assert kept.shape == (6, columns) and kept.all()


def test_a_long_text_stands_below_as_the_spans_kept_by_most_and_by_fewest(run):
    cache, _ = run
    tokens = [f"{i}\n" for i in range(121)]
    figure = plot.survivors(cache, tokens)
    share = kept_directly(cache, [0, 1, 2], 0, 120).mean(axis=0).reshape(10, 12).mean(axis=1)
    some = [i for i in np.argsort(-share, kind="stable") if share[i] < 1]
    assert len(some) >= 6
    written = texts(figure)
    halves = len(some) // 2
    ranges = [text for text in written if "–" in text]
    most, fewest = some[:halves], sorted(some[::-1][:halves], key=lambda i: share[i])
    assert [share[int(text.split("–")[0]) // 12] for text in ranges] == pytest.approx(
        [share[i] for i in [*most, *fewest]]
    )
    for text in ranges:
        start, stop = map(int, text.split("–"))
        assert stop == start + 11
        joined = "".join(f"{i}↵" for i in range(start, stop + 1))
        assert joined in written or joined[:61] + "…" in written
        assert f"{share[start // 12]:.0%}" in written
    assert not any("–" in text for text in texts(plot.survivors(cache)))
    assert pixels(figure).shape != pixels(plot.survivors(cache)).shape


def test_a_short_text_stands_at_its_columns(model):
    cache = PagedCompactCache(model, **EVICTING)
    generate(model, prompt(20), cache, 50)
    tokens = [f"${i}$" for i in range(70)]
    axes = plot.survivors(cache, tokens).axes[1]
    pixels(axes.figure)
    labels = axes.get_xticklabels()
    assert [label.get_text() for label in labels] == tokens[:69]
    assert not any(label.get_parse_math() for label in labels)
    assert list(axes.get_xticks()) == list(range(69))


def test_what_no_survivors_can_be_drawn_of_is_named(run):
    cache, _ = run
    for match, arguments in [
        ("nothing was cached yet", {"cache": small_cache()}),
        ("layer of full attention", {"layers": [3]}),
        ("layers: at least one", {"layers": []}),
        (r"row: within \[0, 2\) expected, got 2", {"row": 2}),
        ("tokens: 120 expected, as the row has seen, got 119", {"tokens": ["a"] * 119}),
    ]:
        with pytest.raises(ValueError, match=match):
            plot.survivors(**{"cache": cache} | arguments)
    with pytest.raises(TypeError, match="tokens: a sequence of strings"):
        plot.survivors(cache, "a" * 200)


# Centroids.


def queries_directly(model, ids, layer, head):
    """complex128 `[n, F]`: bands of a head's queries, from the module that yields them."""
    vectors = captured(model, layer, MODULES["llama"][0], [ids], False).double()[:, head]
    return torch.complex(*vectors.unflatten(-1, (2, -1)).unbind(dim=-2)).numpy()


@pytest.mark.parametrize(("layer", "head", "band", "row"), [(0, 0, 1, 0), (2, 5, 3, 1)])
def test_centroids_show_the_sampled_queries_before_and_after_rope(
    run, model, layer, head, band, row
):
    cache, ids = run
    figure = plot.centroids(cache, layer, head, band, row)
    left, middle, right, _ = figure.axes
    positions = left.collections[0].get_array().astype(int)
    assert positions.tolist() == list(range(120))  # fewer than a sample holds: all of them
    full = build("llama-gqa3-tied")
    before = queries_directly(full, ids[row, :120].tolist(), layer, head)[positions]
    frequency = model.model.rotary_emb.inv_freq.double().numpy()
    after = before * np.exp(1j * positions[:, None] * frequency)
    if layer == 0:  # later layers saw what was evicted, and so other states
        for axes, expected in ((left, before[:, band]), (middle, after[:, band])):
            angle, radius = axes.collections[0].get_offsets().T
            assert np.allclose(radius * np.exp(1j * angle), expected, atol=1e-5)
            bar = axes.lines[0]
            tip = bar.get_ydata()[1] * np.exp(1j * bar.get_xdata()[1])
            assert np.isclose(tip, expected.mean(), atol=1e-5)
            length = abs(expected.mean()) / abs(expected).mean()
            assert axes.get_title().endswith(f"R = {length:.2f}")
        lengths = [abs(z.mean(axis=0)) / abs(z).mean(axis=0) for z in (before, after)]
        for line, expected in zip(right.lines[1:], lengths, strict=True):
            assert np.allclose(line.get_ydata(), expected, atol=1e-5)
    assert list(right.lines[0].get_xdata()) == [band, band]
    turn = 2 * math.pi / frequency[band]
    name = f"Layer {layer}, query head {head}, band {band} (turns once in {turn:,.0f} tokens)"
    assert figure.get_suptitle() == f"{name}, 120 sampled queries"


def test_a_sample_of_a_long_text_stands_at_its_own_positions(model):
    cache, ids = PagedCompactCache(model), prompt(300)
    with torch.no_grad():
        model(ids, **{cache_name(model): cache})
    points = plot.centroids(cache, 0, 1, 2).axes[1].collections[0]
    positions = points.get_array().astype(int)
    assert len(positions) == 128 and 290 < positions.max() < 300 and (np.diff(positions) > 0).all()
    queries = queries_directly(model, ids[0].tolist(), 0, 1)[positions, 2]
    turned = queries * np.exp(1j * positions * float(model.model.rotary_emb.inv_freq[2]))
    angle, radius = points.get_offsets().T
    assert np.allclose(radius * np.exp(1j * angle), turned, atol=1e-4)


def test_layers_heads_bands_and_rows_are_other_points(run):
    cache, _ = run
    points = {
        name: plot.centroids(cache, **arguments).axes[0].collections[0].get_offsets().sum()
        for name, arguments in {
            "default layer": {"band": 1},
            "layer": {"layer_idx": 1, "band": 1},
            "head": {"layer_idx": 1, "head": 2, "band": 1},
            "band": {"layer_idx": 1, "head": 2, "band": 2},
            "row": {"layer_idx": 1, "head": 2, "band": 2, "row": 1},
        }.items()
    }
    assert len(set(points.values())) == len(points)
    statistics = cache.statistics(0)
    own = plot.centroids(statistics, band=1).axes[0].collections[0].get_offsets().sum()
    assert own == points["default layer"]


def test_the_band_shown_is_the_largest_of_those_that_turn(run, model):
    cache, _ = run
    frequency = model.model.rotary_emb.inv_freq.double().numpy()
    turning = frequency * 119 >= 2 * math.pi
    assert 0 < turning.sum() < len(turning)
    sample = cache.statistics(1).sample
    queries = sample.queries[0, sample.held[0], 2].double()
    mean = torch.complex(*queries.unflatten(-1, (2, -1)).unbind(dim=-2)).mean(dim=0).abs()
    expected = int(np.where(turning, mean.numpy(), -1).argmax())
    assert f"band {expected} " in plot.centroids(cache, 1, 2).get_suptitle()


def test_resultant_lengths_are_those_of_all_queries(run):
    cache, _ = run
    for row in (0, 1):
        lengths = plot.resultant_lengths(cache, row=row).axes[0].images[0].get_array()
        for layer in range(3):
            statistics = cache.statistics(layer)
            mean = statistics.query_mean[row].double().unflatten(-1, (2, -1))
            expected = mean.square().sum(dim=-2).sqrt().sum(dim=-1)
            expected = expected / statistics.query_magnitude[row].double().sum(dim=-1)
            assert np.allclose(lengths[layer], expected.numpy())
    figure = plot.resultant_lengths(cache)
    written = [f"{length:.2f}" for length in figure.axes[0].images[0].get_array().ravel()]
    assert [text for text in texts(figure) if text.startswith("0.")] == written


def test_resultant_lengths_of_calibrated_statistics_leave_out_unknown_heads(model):
    known = calibrate(model, None, [prompt(60)[0].tolist()])
    layer = known.layers[1]
    heads = layer.heads.clone()
    heads[2] = False
    layers = dict(known.layers) | {1: layer.having({"heads": heads})}
    part = CalibratedStatistics(layers, known.architecture, known.num_layers)
    figure = plot.resultant_lengths(part)
    lengths = figure.axes[0].images[0].get_array()
    queries = queries_directly(model, prompt(60)[0].tolist(), 1, 3)
    assert lengths[1, 3] == pytest.approx(
        abs(queries.mean(axis=0)).sum() / abs(queries).mean(axis=0).sum(), abs=1e-5
    )
    assert lengths[1, 2] is np.ma.masked and lengths.count() == 17


def test_what_no_centroids_can_be_drawn_of_is_named(run, model):
    cache, _ = run
    other = PagedCompactCache(model, scorer="centroid", **EVICTING)
    knorm = PagedCompactCache(model, scorer="knorm", **EVICTING)
    with torch.no_grad():
        for each in (other, knorm):
            model(prompt(20), **{cache_name(model): each})
    for match, draw, arguments in [
        ("nothing was cached yet", plot.centroids, (small_cache(),)),
        ("layer of full attention", plot.centroids, (cache, 3)),
        (r"head: within \[0, 6\) expected, got 6", plot.centroids, (cache, 0, 6)),
        (r"band: within \[0, 4\) expected, got -1", plot.centroids, (cache, 0, 0, -1)),
        (r"row: within \[0, 2\) expected, got 2", plot.centroids, (cache, 0, 0, 0, 2)),
        ("samples queries", plot.centroids, (other,)),
        ("no queries were seen", plot.centroids, (knorm,)),
        ("of one layer already", plot.centroids, (cache.statistics(0), 0)),
        ("nothing was cached yet", plot.resultant_lengths, (small_cache(),)),
        ("no queries were seen", plot.resultant_lengths, (knorm,)),
        (r"row: within \[0, 2\) expected, got 2", plot.resultant_lengths, (cache, 2)),
    ]:
        with pytest.raises(ValueError, match=match):
            draw(*arguments)
    with pytest.raises(TypeError, match="source: a cache"):
        plot.centroids(3)
    with pytest.raises(TypeError, match="source: a cache"):
        plot.resultant_lengths(cache.statistics(0))


# Budget curves.

ROWS = [
    {"model": "m", "budget": None, "scorer": "-", "accuracy": 0.5, "accuracy_low": 0.4,
     "accuracy_high": 0.6, "kv_bytes": 2**21},
    {"model": "m", "budget": 64, "scorer": "knorm", "accuracy": 0.25, "accuracy_low": None,
     "accuracy_high": None, "kv_bytes": 2**20},
    {"model": "m", "budget": 128, "scorer": "knorm", "accuracy": 0.4, "accuracy_low": 0.3,
     "accuracy_high": 0.6, "kv_bytes": 3 * 2**19},
]  # fmt: skip


def test_budget_curves_show_every_row_with_its_interval():
    figure = plot.budget_curves(ROWS)
    (axes,) = figure.axes
    full, knorm = axes.lines[0], axes.lines[1]
    assert list(full.get_ydata()) == [0.5, 0.5]
    assert list(knorm.get_xdata()) == [64, 128] and list(knorm.get_ydata()) == [0.25, 0.4]
    ends = [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()]
    assert ends == [[0.25, 0.25], pytest.approx([0.3, 0.6])]
    assert axes.get_xlabel() == "budget, tokens (log scale)\n95 % intervals"
    assert axes.get_ylabel() == "accuracy" and axes.get_title(loc="left") == "m"
    assert full.get_zorder() > knorm.get_zorder() and full.get_linestyle() == "--"
    assert texts(figure) == ["m", "full cache", "knorm"]
    figure = plot.budget_curves(ROWS, "kv_bytes")
    points = [
        (x, y)
        for container in figure.axes[0].containers
        for x, y in zip(*container.lines[0].get_data(), strict=True)
    ]
    assert points == [(2.0, 0.5), (1.0, 0.25), (1.5, 0.4)]
    label = "KV memory of a text, MiB (log scale)\n95 % intervals"
    assert figure.axes[0].get_xlabel() == label


def test_budget_curves_say_what_was_measured_and_where_nothing_was_evicted():
    about = {"task": "q", "problems": 1200, "seeds": 1}
    rows = [
        row | about | {"compactions": compactions, "positions": 3 + compactions}
        for row, compactions in zip(ROWS, (0, 2, 0), strict=True)
    ]
    for against, x in (("budget", 128), ("kv_bytes", 1.5)):
        figure = plot.budget_curves(rows, against)
        (axes,) = figure.axes
        hollow = [line for line in axes.lines if line.get_markerfacecolor() == PAPER]
        assert [line.get_xydata().tolist() for line in hollow] == [[[x, 0.4]], []]
        assert "hollow: nothing was evicted" in texts(figure)
        assert axes.get_title(loc="left") == "m, q, 1,200 problems"
        assert axes.get_xlabel().endswith("intervals; each row behind its own first compaction")
    apart = [row | {"model": name} for row in rows for name in "ab"]
    assert plot.budget_curves(apart).axes[0].get_title(loc="left") == "q, 1,200 problems"
    (full,) = [one for one in axes.containers if one.get_label() == "full cache"]
    assert full.lines[0].get_markerfacecolor() == "none"  # a ring around what coincides
    assert full.lines[0].get_zorder() > hollow[0].get_zorder()


def test_budget_curves_tell_models_apart_and_put_divergence_on_a_log_scale():
    rows = [
        {"model": name, "budget": 64, "scorer": scorer, "kl": 0.1, "kv_bytes": 2**20}
        for name in ("a", "b")
        for scorer in ("knorm", "sampled")
    ]
    figure = plot.budget_curves(rows)
    assert texts(figure) == ["a, knorm", "a, sampled", "b, knorm", "b, sampled"]
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_ylabel() == "KL to the full cache, nats (log scale)"
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 4
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 4
    at = np.log2([line.get_xdata()[0] for line in lines])  # around 64
    assert np.allclose(at - 6, [-0.075, -0.025, 0.025, 0.075])
    pixels(figure)
    assert "0.1" in [label.get_text() for label in figure.axes[0].get_yticklabels()]
    with pytest.raises(ValueError, match="against"):
        plot.budget_curves(ROWS, "bytes")
    with pytest.raises(ValueError, match="rows"):
        plot.budget_curves([{"budget": 1}])


# Attention over distance.


ROPES = [
    Rope(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)),
    Rope(torch.tensor([0.5, 0.02], dtype=torch.float64), 1.3, interleaved=True),
    Rope(torch.empty(0, dtype=torch.float64)),
]


@pytest.mark.parametrize("rope", ROPES, ids=["half", "interleaved, partly rotated, scaled", "none"])
def test_logits_by_distance_are_the_means_of_all_pairs_and_the_series_of_the_centroids(rope):
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 2, 40, 6, dtype=torch.float64) + 1
    curves = plot.logits_by_distance(queries, keys, rope, 0.3, points=9)
    positions = torch.arange(40)[None]

    def logits(queries, keys):
        turned = [rope.rotated(vectors[None], positions)[0] for vectors in (queries, keys)]
        return 0.3 * turned[0] @ turned[1].transpose(1, 2)  # [H, query, key]

    means = (vectors.mean(dim=1, keepdim=True).expand_as(vectors) for vectors in (queries, keys))
    every, of_means = logits(queries, keys), logits(*means)
    assert curves.distances[0] == 1 and curves.distances[-1] == round(2 * 40 / 3)
    for i, distance in enumerate(curves.distances.tolist()):
        pairs = every.diagonal(-distance, dim1=1, dim2=2)
        torch.testing.assert_close(curves.measured[:, i], pairs.mean(dim=-1))
        series = of_means.diagonal(-distance, dim1=1, dim2=2)[:, 0]
        torch.testing.assert_close(curves.predicted[:, i], series)
    if rope.bands:
        for head in range(2):
            expected = np.corrcoef(curves.measured[head], curves.predicted[head])[0, 1]
            assert curves.correlation[head].item() == pytest.approx(expected)
    else:
        assert curves.predicted.std(dim=1).max() < 1e-12  # nothing tells distances apart


def test_queries_and_keys_that_never_change_are_predicted_exactly():
    queries, keys = (torch.randn(1, 1, 6).expand(1, 90, 6) for _ in range(2))
    curves = plot.logits_by_distance(queries, keys, ROPES[0])
    torch.testing.assert_close(curves.measured, curves.predicted)
    assert curves.correlation.item() == pytest.approx(1)


def test_attention_over_distance_draws_both_curves_of_each_head():
    torch.manual_seed(0)
    curves = plot.logits_by_distance(*torch.randn(2, 2, 40, 6), ROPES[0])
    figure = plot.attention_over_distance({"one": curves.head(0), "other": curves.head(1)})
    for i, (axes, name) in enumerate(zip(figure.axes, ("one", "other"), strict=True)):
        measured, predicted = axes.lines
        for line, expected in ((measured, curves.measured[i]), (predicted, curves.predicted[i])):
            assert np.array_equal(line.get_xdata(), curves.distances)
            assert np.array_equal(line.get_ydata(), expected)
        assert axes.get_title(loc="left") == f"{name}: r = {curves.correlation[i].item():.2f}"
    assert {"measured", "predicted by the centroids"} <= set(texts(figure))


def test_what_no_distance_can_be_told_of_is_named():
    with pytest.raises(ValueError, match=r"keys.*\[2, 40, 6\].*\[1, 40, 6\]"):
        plot.logits_by_distance(torch.ones(2, 40, 6), torch.ones(1, 40, 6), ROPES[0])
    with pytest.raises(ValueError, match="3 tokens"):
        plot.logits_by_distance(torch.ones(2, 6), torch.ones(2, 6), ROPES[0])
    with pytest.raises(ValueError, match="head_dim"):
        plot.logits_by_distance(torch.ones(40, 4), torch.ones(40, 4), ROPES[0])
    curves = plot.logits_by_distance(torch.ones(2, 40, 6), torch.ones(2, 40, 6), ROPES[0])
    for wrong in ({}, {"both": curves}):
        with pytest.raises(ValueError, match="curves"):
            plot.attention_over_distance(wrong)


# All of them.


def test_pictures_look_the_same_whatever_the_settings_are(run, histories):
    cache, _ = run
    draws = [
        lambda: plot.block_map(cache),
        lambda: plot.live_tokens(histories, ["a", "b"]),
        lambda: plot.blocks_freed(histories[0]),
        lambda: plot.survivors(cache, ["a"] * 120),
        lambda: plot.centroids(cache),
        lambda: plot.resultant_lengths(cache),
        lambda: plot.budget_curves(ROWS),
    ]
    for draw in draws:
        usual = pixels(draw())
        with style.context("dark_background"):
            assert np.array_equal(pixels(draw()), usual)
        assert to_hex(usual[0, 0] / 255) == PAPER


def test_a_notebook_shows_a_picture_in_256_colours_that_look_the_same(run):
    figure = plot.block_map(run[0])
    data, _ = figure._repr_png_()
    image, drawing = Image.open(io.BytesIO(data)), io.BytesIO()
    figure.savefig(drawing, format="png", dpi=100)
    shown, exact = (
        np.asarray(picture.convert("RGB"), dtype=int) for picture in (image, Image.open(drawing))
    )
    assert image.mode == "P"
    assert np.abs(shown - exact).max() <= 16
    assert (shown[exact.min(axis=-1) == 255] == 255).all()  # the paper stays white
    assert len(data) < len(drawing.getvalue())


def test_matplotlib_is_asked_for_and_pyplot_not_needed():
    code = """
import sys, torch, kvpage
sys.modules["matplotlib"] = None
try:
    import kvpage.plot
except ImportError as error:
    assert "pip install 'kvpage[plot]'" in str(error)
else:
    raise SystemExit("imported")
del sys.modules["matplotlib"]
from kvpage import BlockMap, plot
figure = plot.block_map(BlockMap.of_slots(torch.arange(32).view(2, 16)))
data, size = figure._repr_png_()
assert data.startswith(b"\\x89PNG") and size["width"] == round(96 * figure.get_figwidth())
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
