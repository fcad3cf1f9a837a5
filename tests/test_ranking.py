"""The closed form, the statistics behind it, and the order it gives."""

import pytest
import torch
from tiny import build, cache_name, generate, prompt

from kvpage import PagedCompactCache, kernels
from kvpage.rope import Rope
from kvpage.scoring import Centroid, LiveTokens, expected_query
from kvpage.summaries import Statistics

PAPER_OFFSETS = tuple(2**i for i in range(17))  # 1 .. 65536


@pytest.fixture(params=[(False, 1.0), (True, 1.0), (False, 1.3)], ids=["half", "pairs", "scaled"])
def rope(request) -> Rope:
    interleaved, scaling = request.param
    return Rope(10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8), scaling, interleaved)


def as_bands(vectors, rope):
    """The rotated dimensions of `vectors` `[..., D]` as complex numbers `[..., F]`."""
    rotated = vectors[..., : 2 * rope.bands]
    pairs = rotated.unflatten(-1, (-1, 2)) if rope.interleaved else None
    if pairs is not None:
        return torch.complex(pairs[..., 0], pairs[..., 1])
    return torch.complex(rotated[..., : rope.bands], rotated[..., rope.bands :])


def rotate(vectors, positions, rope):
    """RoPE in float64: `[..., D]` at `positions` `[...]`."""
    unit = torch.tensor(rope.attention_scaling, dtype=torch.float64)
    z = as_bands(vectors, rope) * torch.polar(unit, positions[..., None] * rope.inv_freq)
    if rope.interleaved:
        rotated = torch.view_as_real(z).flatten(-2)
    else:
        rotated = torch.cat((z.real, z.imag), dim=-1)
    return torch.cat((rotated, vectors[..., 2 * rope.bands :]), dim=-1)


def example(rope, extra=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dim = 2 * rope.bands + extra

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = draw(2, 50, 4, dim) + 2 * draw(2, 1, 4, dim)
    keys, positions = draw(2, 2, 30, dim), torch.arange(30).expand(2, 2, 30)
    return queries, keys, positions.double()


def live_tokens(keys, statistics, next_position):
    """All of them candidates."""
    positions = torch.arange(keys.shape[2], dtype=torch.int32).expand(keys.shape[:3])
    may_go = torch.ones_like(positions, dtype=torch.bool)
    return LiveTokens(0, keys, keys, positions, may_go, next_position, statistics)


def score(queries, cached, rope, next_position, offsets):
    mean = queries.mean(dim=1)
    magnitude = as_bands(queries, rope).abs().mean(dim=1)
    direction = expected_query(mean, rope, next_position, offsets)
    weight = (magnitude - as_bands(mean, rope).abs()) * rope.attention_scaling
    return kernels.score_tokens(cached, direction, weight, rope.interleaved)[0]


@pytest.mark.parametrize("extra", [0, 4])
def test_closed_form_equals_the_loop_over_offsets(rope, extra):
    queries, keys, positions = example(rope, extra)
    cached = rotate(keys, positions, rope)
    next_position = torch.tensor([30, 12_345])
    mean = queries.mean(dim=1)
    magnitude = as_bands(queries, rope).abs().mean(dim=1)
    total = torch.zeros(2, 4, 30, dtype=torch.float64)
    for offset in PAPER_OFFSETS:
        at = (next_position + offset)[:, None].expand(2, 4).double()
        query = rotate(mean, at, rope)
        total += torch.einsum("bhgd,bhld->bhgl", query.view(2, 2, 2, -1), cached).reshape(2, 4, 30)
    spread = magnitude * (1 - as_bands(mean, rope).abs() / magnitude) * rope.attention_scaling
    norms = as_bands(cached, rope).abs()
    norm_part = torch.einsum("bhgf,bhlf->bhgl", spread.view(2, 2, 2, -1), norms).reshape(2, 4, 30)
    expected = total / len(PAPER_OFFSETS) + norm_part
    got = score(queries, cached, rope, next_position, PAPER_OFFSETS)
    assert ((got - expected).abs() / expected.abs().clamp_min(1)).max() < 1e-9


def test_closed_form_equals_the_papers_phase_form(rope):
    """TriAttention writes it with phases: |q||k| cos(w (distance + offset) + arg q - arg k)."""
    queries, keys, positions = example(rope)
    next_position = torch.tensor([30, 500])
    mean = queries.mean(dim=1)
    magnitude = as_bands(queries, rope).abs().mean(dim=1)
    q, k = as_bands(mean, rope), as_bands(keys, rope)
    expected = torch.zeros(2, 4, 30, dtype=torch.float64)
    for head in range(4):
        kv = k[:, head // 2]  # [B, L, F]
        phase = q[:, head].angle()[:, None] - kv.angle()
        amplitude = q[:, head].abs()[:, None] * kv.abs()
        for offset in PAPER_OFFSETS:
            distance = next_position[:, None] + offset - positions[:, head // 2]
            angle = distance[..., None] * rope.inv_freq + phase
            expected[:, head] += (amplitude * angle.cos()).sum(dim=-1) / len(PAPER_OFFSETS)
        resultant = q[:, head].abs() / magnitude[:, head]
        weight = ((1 - resultant) * magnitude[:, head])[:, None]
        expected[:, head] += (weight * kv.abs()).sum(dim=-1)
    expected *= rope.attention_scaling**2  # of query and key
    got = score(queries, rotate(keys, positions, rope), rope, next_position, PAPER_OFFSETS)
    assert ((got - expected).abs() / expected.abs().clamp_min(1)).max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_in_low_precision_differ_only_by_the_rounding_of_the_keys(rope, dtype, monkeypatch):
    monkeypatch.setattr("kvpage.kernels.reference.SCRATCH_ELEMENTS", 200)  # several chunks
    queries, keys, positions = example(rope)
    cached = rotate(keys, positions, rope).to(dtype)
    mean = queries.mean(dim=1)
    magnitude = as_bands(queries, rope).abs().mean(dim=1)
    statistics = Statistics(mean.float(), magnitude.float(), mean, magnitude, torch.ones(2), rope)
    got = Centroid()(live_tokens(cached, statistics, torch.tensor([30, 30_000])))
    exact = score(
        queries, cached.double(), rope, torch.tensor([30, 30_000]), tuple(2**i for i in range(13))
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama-gqa3-tied", "llama-yarn", "qwen2", "qwen3"])
@pytest.mark.parametrize("budget", [None, 64])
def test_statistics_equal_what_the_projections_put_out(name, budget):
    model = build(name)
    seen = capture(model)
    ids = prompt(50, batch=3)
    real = torch.ones_like(ids)
    real[0, :45], real[1, :3] = 0, 0
    cache = PagedCompactCache(budget=budget, interval=24, recent=16)
    generate(model, ids * real, cache, 100, attention_mask=real)
    flags = torch.nn.functional.pad(real, (0, 99), value=1).bool()
    for index in range(3):
        got = cache.statistics(index)
        assert torch.equal(got.count, flags.sum(dim=1))
        for kind, mean, magnitude in (
            ("query", got.query_mean, got.query_magnitude),
            ("key", got.key_mean, got.key_magnitude),
        ):
            vectors = torch.cat(seen[index, kind], dim=1).double()
            vectors = vectors.view(3, flags.shape[1], mean.shape[1], mean.shape[2])
            for row in range(3):
                own = vectors[row, flags[row]]
                torch.testing.assert_close(mean[row].double(), own.mean(dim=0), atol=1e-6, rtol=0)
                half = mean.shape[2] // 2
                bands = torch.hypot(own[..., :half], own[..., half:]).mean(dim=0)
                torch.testing.assert_close(magnitude[row].double(), bands, atol=1e-6, rtol=0)


def capture(model):
    """What q_proj / q_norm and k_proj / k_norm put out, per layer, as the model runs."""
    seen = {}
    for index, block in enumerate(model.get_decoder().layers):
        attention = block.self_attn
        for kind, norm, projection in (("query", "q_norm", "q_proj"), ("key", "k_norm", "k_proj")):
            module = getattr(attention, norm, None) or getattr(attention, projection)
            outputs = seen[index, kind] = []
            module.register_forward_hook(lambda _m, _a, out, outputs=outputs: outputs.append(out))
    return seen


def test_concentration_is_one_for_identical_queries_and_small_for_scattered_ones(rope):
    queries, _, _ = example(rope)
    identical = queries[:, :1].expand_as(queries)
    for vectors, check in ((identical, lambda r: r > 1 - 1e-5), (queries, lambda r: r < 1)):
        statistics = Statistics(
            vectors.mean(dim=1).float(),
            as_bands(vectors, rope).abs().mean(dim=1).float(),
            *[torch.zeros(1)] * 3,
            rope,
        )
        assert check(statistics.query_concentration).all()


def test_the_next_position_is_each_rows_own():
    """Scoring at 2,127 uses 2,127, and a padded row its own count."""
    seen = []

    def spy(tokens):
        seen.append(tokens.next_position.tolist())
        return torch.zeros(tokens.keys.shape[:3])

    model = build("llama-gqa3-tied")
    ids = prompt(30, batch=2)
    real = torch.ones_like(ids)
    real[0, :11] = 0
    cache = PagedCompactCache(budget=64, interval=24, recent=16, scorer=spy)
    generate(model, ids * real, cache, 110, attention_mask=real)
    rounds = [88, 112, 136]  # budget + interval seen, then every interval
    assert seen == [[at - 11, at] for at in rounds for _ in range(3)]


def test_centroid_keeps_the_keys_the_coming_queries_will_look_at():
    """A needle whose key points along the queries survives among hundreds that do not."""
    dim, live = 32, 400
    rope = Rope(10_000.0 ** (-torch.arange(16, dtype=torch.float64) / 16), 1.0)
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(dim, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 1, live, dim, generator=generator, dtype=torch.float64)
    keys[0, 0, 123] = 2 * centre
    cached = rotate(keys, torch.arange(live).double()[None, None], rope)
    statistics = Statistics(
        centre.view(1, 1, -1).float(),
        as_bands(centre, rope).abs().view(1, 1, -1).float(),
        *[torch.zeros(1)] * 3,
        rope,
    )
    scores = Centroid()(live_tokens(cached.float(), statistics, torch.tensor([live])))
    assert scores[0, 0].argmax() == 123


def test_a_model_whose_embedding_is_not_its_inv_freq_is_refused():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model)
    model.get_decoder().rotary_emb.inv_freq *= 1.5
    with pytest.raises(ValueError, match="rotary embedding"):
        model(prompt(20), **{cache_name(model): cache})
    assert cache.get_seq_length() == 0
