"""Fidelity figures are those of a direct computation."""

import pytest
import torch
from families import family
from oracle import allowed_columns, oracle_logits
from tiny import build, cache_name, prompt

from kvpage.evaluation import Contender, fidelity, pooled
from kvpage.evaluation.attention_mass import eager_attention
from kvpage.evaluation.fidelity import Fidelity

TOKENS, PROMPT, STEP = 232, 24, 8
SMALL = {"interval": 32, "sinks": 4, "recent": 16}
LAYERS = 3


def contenders(budget=64, scorers=("centroid", "knorm", "random", "streaming")):
    return [Contender(budget, scorer, SMALL) for scorer in scorers]


def measured(model, ids, some, **options):
    return fidelity(model, ids, some, prompt=PROMPT, step=STEP, **options)


def traced(model, ids, contender):
    """What the same cache kept, fed by hand."""
    cache = contender.cache(model, trace=True, pin_prompt=False)
    starts = [0, *range(PROMPT, len(ids) - 1, STEP)]
    with torch.no_grad():
        for start, stop in zip(starts, [*starts[1:], len(ids) - 1], strict=True):
            model(ids[None, start:stop], **{cache_name(model): cache})
    return cache.trace


@pytest.fixture(scope="module")
def case():
    model = build("llama-gqa3-tied", dtype=torch.float64)
    ids = prompt(TOKENS)[0]
    return model, ids, measured(model, ids, contenders())


@pytest.mark.parametrize("index", range(4))
def test_kl_nll_and_agreement_are_those_of_two_whole_forwards(case, index):
    model, ids, results = case
    trace = traced(model, ids, contenders()[index])
    first = trace[0].seen_tokens
    fed = ids[None, :-1]
    own = oracle_logits(model, fed, trace)[0, first:].log_softmax(-1)
    full = oracle_logits(model, fed, [])[0, first:].log_softmax(-1)
    kl = (full.exp() * (full - own)).sum(-1)
    rows, targets = torch.arange(len(kl)), ids[first + 1 :]
    got = results[index]
    assert got.positions == len(kl) == TOKENS - 1 - first and got.compactions == len(trace) == 5
    assert got.kl == pytest.approx(kl.mean().item(), rel=1e-6) and got.kl > 1e-3
    blocks = [(part.sum().item(), len(part)) for part in kl.split(SMALL["interval"])]
    assert got.kl_blocks == [(pytest.approx(s, rel=1e-6), n) for s, n in blocks]
    assert got.nll == pytest.approx(-own[rows, targets].mean().item(), rel=1e-6)
    assert got.nll_full == pytest.approx(-full[rows, targets].mean().item(), rel=1e-6)
    assert got.top1 == pytest.approx((own.argmax(-1) == full.argmax(-1)).double().mean().item())
    low, high = got.kl_interval
    assert low < got.kl < high


@pytest.mark.parametrize("index", range(4))
def test_mass_kept_is_that_of_the_whole_softmax_under_the_masks(case, index):
    model, ids, results = case
    trace = traced(model, ids, contenders()[index])
    first, fed = trace[0].seen_tokens, ids[None, :-1]
    with eager_attention(model), torch.no_grad():
        attentions = model(fed, use_cache=False, output_attentions=True).attentions
    for layer, attention in enumerate(attentions):
        live = allowed_columns(trace, layer, torch.ones_like(fed, dtype=torch.bool), 6)[
            :, :, first:
        ]
        late = attention[:, :, first:]
        share = late.masked_fill(~live, 0).sum() / late.sum()
        assert results[index].mass[layer] == pytest.approx(share.item(), rel=1e-5)
        assert 0 < results[index].mass[layer] < 1


def test_an_oracle_as_a_scorer_keeps_what_the_oracle_of_the_mass_does(case):
    """Its compactions fall on the bins that it knows the attention in, so both are the same."""
    model, ids, results = case
    for step in (STEP, 1):
        (got,) = fidelity(
            model, ids, contenders(scorers=("oracle",)), prompt=PROMPT + 8 * (step == 1), step=step
        )
        assert got.scorer == "oracle" and got.name == "oracle 64" and got.compactions == 5
        assert got.mass == pytest.approx(got.mass_oracle, rel=1e-5)
    assert all(result.mass_share < got.mass_share for result in results)
    with pytest.raises(ValueError, match="attention_mass: True expected with scorer='oracle'"):
        measured(model, ids, contenders(scorers=("oracle",)), attention_mass=False)


def test_the_oracle_keeps_the_keys_of_greatest_mass_to_come():
    model = build("llama-gqa3-tied", dtype=torch.float64)
    ids = prompt(120)[0]  # one compaction, at 96
    results = measured(model, ids, contenders())
    with eager_attention(model), torch.no_grad():
        attentions = model(ids[None, :-1], use_cache=False, output_attentions=True).attentions
    for layer, attention in enumerate(attentions):
        late = attention[0, :, 96:].sum(dim=1).view(2, 3, -1).sum(dim=1)  # [Hkv, K]
        best = 0.0
        for head in late:
            free = sorted(head[4 : 96 - 16].tolist(), reverse=True)[: 64 - 4 - 16]
            best += sum(free) + (head[:4].sum() + head[80:].sum()).item()
        for got in results:
            assert got.compactions == 1
            assert got.mass_oracle[layer] == pytest.approx(best / late.sum().item(), rel=1e-5)
            assert got.mass[layer] <= got.mass_oracle[layer] + 1e-9
    assert all(0 < got.mass_to_oracle < 1 for got in results)


def test_attention_error_is_that_of_the_modules_outputs(case):
    model, ids, results = case
    trace = traced(model, ids, contenders()[0])
    outputs = {"full": [], "own": []}
    for name, events in (("full", []), ("own", trace)):
        handles = [
            layer.self_attn.register_forward_hook(
                lambda m, a, out, n=name: outputs[n].append(out[0])
            )
            for layer in model.model.layers
        ]
        oracle_logits(model, ids[None, :-1], events)
        for handle in handles:
            handle.remove()
    first = trace[0].seen_tokens
    for layer in range(LAYERS):
        full, own = (outputs[name][layer][0, first:] for name in ("full", "own"))
        error = (full - own).norm() / full.norm()
        assert results[0].attention_error[layer] == pytest.approx(error.item(), rel=1e-4)


def test_a_cache_that_never_evicts_is_the_full_cache():
    model = build("qwen3")
    got, roomy = measured(model, prompt(96)[0], [Contender(None), Contender(96, "knorm", SMALL)])
    for one in (got, roomy):
        assert one.positions == 96 - 1 - PROMPT and one.compactions == 0
        assert one.kl < 1e-9 and one.top1 == 1.0 and abs(one.delta_perplexity) < 1e-4
        assert one.mass == one.mass_oracle == [1.0] * LAYERS
        assert max(one.attention_error) < 1e-5
    assert got.name == "full" and roomy.name == "knorm 96"


def test_contenders_do_not_depend_on_who_else_is_measured():
    model, ids = build("llama-gqa3-tied"), prompt(TOKENS)[0]
    some = [*contenders(64), Contender(48, "centroid", SMALL | {"interval": 24})]
    together = measured(model, ids, some)
    for contender, expected in zip(some, together, strict=True):
        (alone,) = measured(model, ids, [contender])
        assert alone.kl_blocks == expected.kl_blocks
        assert alone.mass == pytest.approx(expected.mass, rel=1e-6)
        assert alone.mass_oracle == pytest.approx(expected.mass_oracle, rel=1e-6)


def test_the_model_is_left_as_it_was_also_after_an_error():
    model, ids = build("llama-gqa3-tied"), prompt(60)[0]

    def stop(tokens):
        assert model.config._attn_implementation == "eager"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(model, ids, contenders(), progress=stop)
    assert model.config._attn_implementation == "sdpa"
    assert not any(layer.self_attn._forward_hooks for layer in model.model.layers)


def test_without_probabilities_mass_is_none_and_the_rest_is_there():
    model, ids = build("llama-gqa3-tied"), prompt(TOKENS)[0]
    with_mass, without = (
        measured(model, ids, contenders(scorers=["knorm"]), attention_mass=wanted)[0]
        for wanted in (True, False)
    )
    assert without.mass is without.mass_oracle is without.mass_share is None
    assert without.mass_to_oracle is None
    assert without.kl == pytest.approx(with_mass.kl, rel=1e-3)


def test_sliding_layers_count_in_the_logits_only():
    model = family("gemma3")
    ids = prompt(TOKENS)[0]
    (got,) = measured(model, ids, contenders(scorers=["knorm"]))
    full = sum(kind == "full_attention" for kind in model.config.layer_types)
    assert len(got.mass) == len(got.attention_error) == full < model.config.num_hidden_layers
    assert got.kl > 0


def test_texts_are_pooled_by_positions():
    model = build("llama-gqa3-tied")
    (one,), (two,) = (
        measured(model, prompt(n, seed=n)[0], contenders(scorers=["knorm"])) for n in (150, 232)
    )
    both = pooled([one, two])
    assert both.positions == one.positions + two.positions
    total = one.kl * one.positions + two.kl * two.positions
    assert both.kl == pytest.approx(total / both.positions)
    mass = [(a * one.positions + b * two.positions) / both.positions
            for a, b in zip(one.mass, two.mass, strict=True)]  # fmt: skip
    assert both.mass == pytest.approx(mass)
    assert Fidelity(**both.to_dict()) == both


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 232}, "prompt: 1 to 231"),
        ({"prompt": 0}, "prompt: 1 to"),
        ({"step": 33}, "step: 1 to the interval, 32"),
        ({"contenders": []}, "contenders: at least one"),
        ({"contenders": [Contender(64, options={"pin_prompt": True})]}, "pin_prompt"),
        ({"ids": prompt(20)}, r"ids: int64 \[T\] expected, got torch.int64 \[1, 20\]"),
    ],
)
def test_bad_input_is_named(change, message):
    model = build("llama-gqa3-tied")
    arguments = {"ids": prompt(232)[0], "contenders": contenders(), "prompt": 24, "step": 8}
    with pytest.raises((ValueError, TypeError), match=message):
        fidelity(model, **(arguments | change))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="evaluation mode"):
        measured(build("llama-gqa3-tied").train(), prompt(60)[0], contenders())


def test_states_are_fed_token_by_token():
    model, ids = family("lfm2"), prompt(140)[0]
    with pytest.raises(ValueError, match="step: 1 expected for a model whose layers have states"):
        measured(model, ids, contenders())
    (got,) = fidelity(model, ids, contenders(scorers=["knorm"]), prompt=PROMPT, step=1)
    assert got.kl > 0 and got.compactions == 2
