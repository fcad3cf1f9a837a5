"""The examples do what they say, on tiny checkpoints; nothing is fetched."""

import re
import sys
from pathlib import Path

import best_of_n
import chat
import evaluate_finetuned
import long_trace
import pytest
import serve_openai
import torch
from checkpoints import save_checkpoint, save_questions, train_adapter
from loading import CACHE, ask, load
from tiny import build, prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, dynamic_module_utils

from kvpage import Footprint, PagedCompactCache
from kvpage.evaluation import TaskStudy

EXAMPLES = Path(chat.__file__).parent
SMALL = {"budget": 64, "interval": 16, "recent": 16}
OPTIONS = ["--budget", "64", "--interval", "16", "--recent", "16"]
TEMPLATE = (
    "{% for turn in messages %}{{ 'Question: ' if turn['role'] == 'user' else 'Answer: ' }}"
    "{{ turn['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
)
QUESTIONS = ["the apple is the stone", "again river", "list the same path", "from 7 to 42"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without a chat template, one with it, questions, and an adapter that learnt them."""
    path = tmp_path_factory.mktemp("examples")
    save_checkpoint(path / "base")
    save_checkpoint(path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(path / "chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path / "chat")
    save_questions(path / "questions.jsonl")
    train_adapter(path / "base", path / "questions.jsonl", path / "lora")
    return path


@pytest.fixture
def remote_code(tmp_path, monkeypatch):
    """Where transformers copies code that it loads, for this test only."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def fed_tokens(model):
    """A list that grows by the number of tokens of each forward, and the hook that fills it."""
    fed = []
    embed = model.get_input_embeddings()
    return fed, embed.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))


# chat.py


def test_every_turn_of_a_chat_answers_as_over_the_whole_conversation_and_feeds_what_is_new(folder):
    model, tokenizer = load(str(folder / "chat"), device="cpu")
    talk, total = chat.Chat(model, tokenizer, PagedCompactCache()), 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    for question in QUESTIONS:
        fed, hook = fed_tokens(model)
        answer = talk.say(question, **options)
        hook.remove()
        total += sum(fed)
        assert total == len(talk.ids) - 1
        whole = torch.tensor([talk.ids[:-12]])
        expected = model.generate(whole, **options, **{CACHE: DynamicCache()})[0].tolist()
        assert talk.ids == expected
        assert answer == tokenizer.decode(expected[-12:], skip_special_tokens=True)


def test_a_turn_ends_once_whoever_ended_it(folder):
    model, tokenizer = load(str(folder / "chat"), device="cpu")
    talk = chat.Chat(model, tokenizer, PagedCompactCache())
    turns = [("user", "again river"), ("assistant", "apple"), ("user", "the stone")]
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    asked, apple = talk.new_ids("again river"), tokenizer("apple").input_ids
    for answer in (apple, [*apple, tokenizer.eos_token_id]):  # cut off, and ended by the model
        talk.ids = asked + answer
        assert talk.ids + talk.new_ids("the stone") == rendered


def test_a_chat_says_what_its_cache_holds(folder, capsys):
    arguments = ["--model", str(folder / "chat"), "--device", "cpu", "--max-new-tokens", "40"]
    assert chat.main([*arguments, *OPTIONS, "--say", *QUESTIONS]) == 0
    out = capsys.readouterr().out
    assert all(f"> {question}" in out for question in QUESTIONS)
    found = re.findall(r"(\d+) tokens seen, (\d+) live \S+ (\d+) of (\d+) blocks used, (\d+)", out)
    seen, live, used, reserved, freed = zip(*[map(int, line) for line in found], strict=True)
    assert len(seen) == 4 and list(seen) == sorted(set(seen)) and seen[-1] > 64 + 16 >= max(live)
    assert all(-(-tokens // 16) == blocks for tokens, blocks in zip(live, used, strict=True))
    assert max(used) <= max(reserved) and freed[-1] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "nowhere"], "--device: can't use 'nowhere'"),
        (["--model", "no-such-folder"], "--model: no folder no-such-folder"),
    ],
)
def test_what_can_not_be_loaded_is_one_line(folder, options, said):
    with pytest.raises(SystemExit, match=said):
        long_trace.main(["--model", str(folder / "chat"), *options])


def test_a_chat_needs_a_chat_template(folder, capsys):
    assert chat.main(["--model", str(folder / "base"), "--device", "cpu", "--say", "hello"]) == 2
    assert "a chat template expected" in capsys.readouterr().err


# best_of_n.py


def test_answers_share_the_blocks_of_their_prompt_and_are_drawn_as_without(folder, monkeypatch):
    model, tokenizer = load(str(folder / "base"), device="cpu")
    ids, n = prompt(75), 5
    ends, options = [tokenizer.eos_token_id, 7], {"max_new_tokens": 30, "temperature": 1.5}
    outputs, generate = [], model.generate

    def recorded(*args, **kwargs):
        outputs.append(generate(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(model, "generate", recorded)
    fed, hook = fed_tokens(model)
    cache = PagedCompactCache()
    torch.manual_seed(0)
    samples = best_of_n.sample(model, tokenizer, ids, n, cache, ends, **options)
    report, sequences = cache.report(), outputs[0].sequences
    hook.remove()

    options |= {"do_sample": True, "eos_token_id": ends, "pad_token_id": ends[0]}
    torch.manual_seed(0)
    alone = generate(ids.repeat(n, 1), **options, **{CACHE: DynamicCache()})
    assert torch.equal(sequences, alone)
    assert fed[0] == 74 and set(fed[1:]) == {1}  # the prompt went through once

    caches = [PagedCompactCache() for _ in range(n)]
    with torch.no_grad():
        for row, own in zip(sequences, caches, strict=True):
            model(row[None, :-1], **{CACHE: own})
    blocks = [own.report().blocks_used for own in caches]
    assert report.seen_tokens == sequences.shape[1] - 1 and len(set(blocks)) == 1
    assert report.blocks_used == 74 // 16 + sum(count - 74 // 16 for count in blocks)

    for row, one in zip(sequences, samples, strict=True):
        answer = row[75:].tolist()
        length = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
        with torch.no_grad():
            logprobs = model(row[None, :-1]).logits[0].double().log_softmax(-1)
        means = logprobs[range(74, 74 + length), answer[:length]].mean().item()
        assert one.logprob == pytest.approx(means, abs=1e-4)


def test_the_best_is_the_likeliest_of_all_or_of_the_majority():
    texts = ["so 3 + 4 = 7", r"\boxed{8} or 9", "it is 8", "1,000.5", "none"]
    values = (-0.1, -0.9, -0.4, -0.2, -0.05)
    samples = [
        best_of_n.Sample(text, value, best_of_n.last_number(text))
        for text, value in zip(texts, values, strict=True)
    ]
    assert [one.number for one in samples] == ["7", "8", "8", "1000.5", None]
    assert best_of_n.best(samples, "vote") is samples[2]
    assert best_of_n.best(samples, "logprob") is samples[4]


def test_best_of_n_prints_every_answer_and_the_blocks(folder, capsys):
    arguments = ["--model", str(folder / "base"), "--device", "cpu", "--n", "3"]
    assert best_of_n.main([*arguments, "--max-new-tokens", "20"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("→") == 1
    held, times, each, total = map(
        int, re.search(r"hold (\d+) blocks .* own, (\d+) times (\d+) = (\d+)", out).groups()
    )
    assert times == 3 and total == times * each > held
    assert best_of_n.main([*arguments[:-1], "0"]) == 2
    assert "--n: at least 1 expected" in capsys.readouterr().err


# evaluate_finetuned.py


def arguments_of(folder, out):
    made = ["--model", str(folder / "base"), "--adapter", str(folder / "lora"), "--device", "cpu"]
    made += ["--data", str(folder / "questions.jsonl"), "--out", str(out), "--batch-size", "2"]
    return [*made, "--budgets", "48", "--interval", "32", "--recent", "16", "--max-new-tokens", "4"]


def test_an_evaluation_goes_on_where_it_was_stopped(folder, tmp_path, capsys, monkeypatch):
    generate, calls = TaskStudy._generate, []

    def stopped_at_the_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args)

    monkeypatch.setattr(TaskStudy, "_generate", stopped_at_the_third)
    arguments = arguments_of(folder, tmp_path)
    assert evaluate_finetuned.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert evaluate_finetuned.main(arguments) == 0
    assert len(calls) == 3 + 4  # three batches for each of two caches, two of them done before
    out = capsys.readouterr().out
    named = re.findall(rf"{tmp_path}\S+\.(?:md|png)", out)
    assert len(named) == 3 and all(Path(name).stat().st_size > 0 for name in named)
    assert (tmp_path / "tasks.md").read_text().count("| base + lora | questions |") == 2
    assert "1 [0.61, 1]" in out  # the adapter learnt the answers


def test_a_text_is_evaluated_too_and_what_is_wrong_is_said(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the apple is the stone again river list " * 40)
    arguments = ["--model", str(folder / "base"), "--out", str(tmp_path), "--device", "cpu"]
    options = ["--tokens", "200", "--budgets", "64", "--interval", "32", "--recent", "16"]
    assert evaluate_finetuned.main([*arguments, *options, "--text", str(text)]) == 0
    assert "fidelity-budget.png" in capsys.readouterr().out
    assert evaluate_finetuned.main([*arguments, "--budgets", "10"]) == 2
    assert "error: budget: at least" in capsys.readouterr().err
    assert evaluate_finetuned.main([*arguments, "--data", "no.jsonl"]) == 2
    assert "no.jsonl" in capsys.readouterr().err


# long_trace.py


def test_a_long_trace_is_compared_with_what_a_dynamic_cache_holds(folder, capsys):
    arguments = ["--model", str(folder / "base"), "--device", "cpu", "--prompt", "the river"]
    assert long_trace.main([*arguments, *OPTIONS, "--new-tokens", "110", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "110 tokens decoded" in out and "never bound" not in out
    assert long_trace.main([*arguments, "--new-tokens", "40", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "the budget never bound" in out
    assert re.search(r"same tokens from the start\D+40", out)
    assert long_trace.main([*arguments, "--new-tokens", "1"]) == 2


def test_what_a_full_cache_holds_is_reckoned_right(folder):
    model, tokenizer = load(str(folder / "base"), device="cpu")
    cache, ids = DynamicCache(config=model.config), ask(tokenizer, " ".join(QUESTIONS))
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert Footprint.of(model).dynamic_bytes(ids.shape[1]) == held


# custom_generate/ and serve_openai.py

DECODE = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False}


@pytest.mark.core
def test_custom_generate_decodes_as_with_the_cache(remote_code):
    model, ids, cache = build("llama-gqa3-tied"), prompt(60, batch=2), PagedCompactCache(**SMALL)
    expected = model.generate(ids, **DECODE, **{CACHE: cache})
    options = {"custom_generate": str(EXAMPLES / "custom_generate"), "trust_remote_code": True}
    got = model.generate(ids, **DECODE, **SMALL, **options, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    used = got.cache if hasattr(got, "cache") else got.past_key_values
    assert used.report().compactions == cache.report().compactions >= 4
    assert not torch.equal(model.generate(ids, **DECODE, **options), expected)  # budget 2048
    with pytest.raises(ValueError, match="cache: none expected"):
        model.generate(ids, **options, **{CACHE: cache})
    with pytest.raises(ValueError, match="budget: at least"):
        model.generate(ids, **options, budget=3)


@pytest.mark.core
def test_a_composed_model_generates_under_its_budget(folder, tmp_path, remote_code):
    serve_openai.compose(folder / "base", tmp_path / "me" / "served", SMALL)
    served = AutoModelForCausalLM.from_pretrained(
        tmp_path / "me" / "served", trust_remote_code=True
    )
    model, ids = load(str(folder / "base"), device="cpu")[0], prompt(60)
    expected = model.generate(ids, **DECODE, **{CACHE: PagedCompactCache(**SMALL)})
    assert torch.equal(served.generate(inputs=ids, **DECODE), expected)
    config = served.generation_config  # a server hands its own over
    assert torch.equal(served.generate(input_ids=ids, generation_config=config, **DECODE), expected)
    assert not torch.equal(model.generate(ids, **DECODE), expected)


def test_a_server_is_refused_settings_that_every_request_would_stumble_over(capsys, monkeypatch):
    monkeypatch.setattr(serve_openai, "find_spec", lambda name: True)
    assert serve_openai.main(["--budget", "3"]) == 2
    assert "budget: at least" in capsys.readouterr().err
    monkeypatch.setattr(serve_openai, "find_spec", lambda name: None)
    assert serve_openai.main([]) == 2
    assert "transformers[serving]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "example",
    [best_of_n, chat, evaluate_finetuned, long_trace, serve_openai],
    ids=lambda e: e.__name__,
)
def test_help_shows_how_an_example_is_run(example, capsys):
    with pytest.raises(SystemExit) as done:
        example.main(["--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0 and f"python examples/{example.__name__}.py" in out
    assert "--model" in out and "default" in out
