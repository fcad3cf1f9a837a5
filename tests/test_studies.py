"""Studies: estimates, made-up texts, answers, and results that survive a crash."""

import csv
import io
import json
import math
import random
import warnings
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from statistics import NormalDist

import pytest
import torch
from checkpoints import QUESTIONS, save_checkpoint, save_questions
from families import family
from tiny import build, cache_name, prompt
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from kvpage.evaluation import (
    FULL,
    Contender,
    bootstrap_interval,
    evaluate,
    pass_at_k,
    wilson_interval,
)
from kvpage.evaluation.answers import is_right, method, reference
from kvpage.evaluation.memory import TASKS, MemoryStudy, answered, encoded, example
from kvpage.evaluation.runner import Journal, Subject, Work, grouped, run
from kvpage.evaluation.tables import comma_separated, markdown, save, terminal
from kvpage.evaluation.tasks import TaskStudy, load_problems
from kvpage.evaluation.texts import FidelityStudy
from kvpage.footprint import Footprint

SMALL = {"interval": 32, "sinks": 4, "recent": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("study")
    save_checkpoint(path / "model")
    save_questions(path / "questions.jsonl")
    words = " ".join(example("copying", 900, 0, lambda text: len(text.split())).text.split())
    (path / "text.txt").write_text(words)
    return path


# Estimates.


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n, c in product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if c <= n:
                subsets = list(combinations([i < c for i in range(n)], k))
                expected = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(3, 1, 4)


def test_wilson_ends_where_the_score_test_just_rejects():
    z = NormalDist().inv_cdf(0.975)
    for successes, count in ((0, 6), (3, 10), (40, 41), (7, 7)):
        low, high = wilson_interval(successes, count)
        share = successes / count
        for bound in (low, high):
            if 0 < bound < 1:
                score = abs(share - bound) / math.sqrt(bound * (1 - bound) / count)
                assert score == pytest.approx(z)
        assert 0 <= low <= share <= high <= 1
    assert wilson_interval(0, 0) is None


def test_the_block_bootstrap_covers_a_mean_of_dependent_blocks():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        level = torch.randn(30, generator=generator)  # each block has a level of its own
        low, high = bootstrap_interval([(8 * x, 8) for x in level.tolist()], resamples=300)
        covered += low <= 0 <= high
    assert 0.88 <= covered / 200 <= 0.99
    assert bootstrap_interval([(1.0, 4)]) is None


# Answers.


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("72", "48 / 2 = 24 and 48 + 24 = \\boxed{72}", True),
        ("72", "The answer is 72.", True),
        ("72", "The answer is 71.", False),
        ("1,234", "so \\boxed{1234}", True),
        ("\\frac{1}{2}", "half, $0.5$", True),
        ("(3, 4)", "\\boxed{(3,4)}", True),
        ("x^2+1", "\\boxed{1+x^2}", True),
        ("p - q", "\\boxed{p + q}", False),
        ("Paris", "Let me think. Rome?\nThe answer is: paris.", True),
        ("Paris", "Paris is not the answer.\nRome", False),
        ("New York", "\\boxed{\\text{New York}}", True),
        ("yes", "yes", True),
        ("yes", "no", False),
    ],
)
def test_answers_are_compared_by_what_they_mean(answer, text, right):
    pytest.importorskip("math_verify")
    assert is_right(answer, text) is right


def test_plain_words_are_told_from_mathematics():
    assert {method(text) for text in ("Paris", "New York", "yes", "don't know")} == {"string"}
    maths = ("7", "x", "\\pi", "x+1", "\\text{Evelyn}", "3 apples", "(a, b)", "-2")
    assert {method(text) for text in maths} == {"math-verify"}
    assert reference("48/2 = <<48/2=24>>24\n#### 1,072") == "1,072"
    assert reference("\\frac{1}{2}") == "\\frac{1}{2}"


def test_problems_come_from_any_jsonl(tmp_path):
    file = tmp_path / "some.jsonl"
    lines = [
        {"question": "a?", "answer": "It is.\n#### 5"},
        {"problem": "b?", "answer": "\\pi", "solution": "long"},
        {"prompt": "c?", "solution": 3},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    got = [(p.question, p.answer) for p in load_problems(str(file))]
    assert got == [("a?", "5"), ("b?", "\\pi"), ("c?", "3")]
    assert len(load_problems(str(file), limit=2)) == 2
    for text, message in (
        ('{"question": "a?"}', "line 1: one of answer, .* expected, got question"),
        ("{", "line 1: JSON expected"),
        ("[1]", "line 1: one of question, .* expected, got list"),
        ("", "problems expected"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_problems(str(file))
    with pytest.raises(FileNotFoundError):
        load_problems(str(tmp_path / "none.jsonl"))


# Memory.


def solved(task, text):
    """The answer that a reader of the text would give."""
    *lines, question = text.split("\n")
    if task == "recall":
        codes = dict(line.removesuffix(".").rsplit(" is ", 1) for line in lines)
        return " " + codes[question.removesuffix(" is")]
    if task == "passkey":
        return " " + lines[0].split("The pass key is ")[1].split(".")[0]
    if task == "copying":
        return " " + lines[0].removeprefix("The list: ")
    stack = []
    for line in lines[1:]:
        if line.startswith("Go down to "):
            stack.append(line.removeprefix("Go down to ").removesuffix("."))
        else:
            stack.pop()
            assert line == f"Go back up to {stack[-1] if stack else 'root'}."
    return f" {' '.join(stack)}."


@pytest.mark.parametrize("task", TASKS)
def test_texts_can_be_answered_from_what_they_say(task):
    for seed, items in product(range(5), (1, 2, 7, 40, 500)):
        made = TASKS[task](random.Random(seed), items)
        assert made == TASKS[task](random.Random(seed), items)
        assert made.answer == solved(task, made.text) and made.answer.strip()
    assert len({TASKS[task](random.Random(seed), 40).answer for seed in range(8)}) > 4


@pytest.mark.parametrize("task", TASKS)
def test_texts_are_as_long_as_asked(task):
    def count(text):
        return len(text.split())

    for tokens in (60, 200, 1000):
        length = count(example(task, tokens, 3, count).text)
        assert tokens - 20 <= length <= tokens
    with pytest.raises(ValueError, match=r"tokens: .* expected"):
        example(task, 3, 0, count)


def test_hits_are_the_tokens_a_full_forward_finds_likeliest():
    model = build("llama-gqa3-tied")
    ids = prompt(90)[0]
    with torch.no_grad():
        found = model(ids[None]).logits[0].argmax(-1)
    ids[70:] = found[69:-1]  # some of these are, once they are in the text, still likeliest
    with torch.no_grad():
        found = model(ids[None]).logits[0].argmax(-1)
    for text_tokens, step in product((70, 71, 64, 33), (1, 16, 24)):
        expected = int((found[text_tokens - 1 : -1] == ids[text_tokens:]).sum())
        got = answered(model, ids, text_tokens, FULL, step)
        assert got["hits"] == expected and got["answer_tokens"] == 90 - text_tokens
        assert got["compactions"] == 0
    assert expected > 0


def test_under_a_budget_hits_are_those_of_the_evicting_cache():
    model, ids = build("llama-gqa3-tied"), prompt(150)[0]
    contender = Contender(64, "knorm", SMALL)
    cache, found = contender.cache(model, pin_prompt=False), []
    with torch.no_grad():
        for start in range(0, 149, 16):
            part = ids[None, start : min(start + 16, 149)]
            found.append(model(part, **{cache_name(model): cache}).logits[0].argmax(-1))
    ids[130:] = torch.cat(found)[129:]
    cache, found = contender.cache(model, pin_prompt=False), []
    with torch.no_grad():
        for start in range(0, 149, 16):
            part = ids[None, start : min(start + 16, 149)]
            found.append(model(part, **{cache_name(model): cache}).logits[0].argmax(-1))
    expected = int((torch.cat(found)[129:] == ids[130:]).sum())
    got = answered(model, ids, 130, contender)
    assert got["hits"] == expected > 0 and got["compactions"] == 2


@pytest.mark.parametrize("name", ["llama-gqa3-tied", "gemma3"])
def test_bytes_are_those_of_the_live_tokens_of_one_text(name):
    """Not of the room that storage has to grow: what never binds saves nothing."""
    model = family(name) if name == "gemma3" else build(name)
    ids = prompt(150, 3)
    held = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:1, :149], **{cache_name(model): held})
    layers = [layer for layer in held.layers if layer.keys is not None]
    dynamic = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    full = answered(model, ids[0], 130, FULL)
    assert full["kv_bytes"] == dynamic and full["statistics_bytes"] == 0
    for scorer, budget, compactions in (("sampled", 64, 2), ("knorm", 64, 2), ("sampled", 512, 0)):
        contender = Contender(budget, scorer, SMALL)
        got = answered(model, ids[0], 130, contender)
        footprint = Footprint.of(model)
        most = -(-min(149, 96) // 16) if compactions else -(-149 // 16)  # budget + interval
        window = sum(
            most_of_window(layer.window) * footprint._kv_bytes(layer)
            for layer in footprint.layers
            if layer.window is not None
        )
        assert got["compactions"] == compactions
        assert got["kv_bytes"] == most * 16 * footprint.bytes_per_token + window
        assert (got["statistics_bytes"] > 0) is (scorer == "sampled")
        if name != "gemma3" and not compactions:
            block = 16 * footprint.bytes_per_token
            assert dynamic <= got["kv_bytes"] <= dynamic + block
        batch = contender.cache(model)
        with torch.no_grad():
            for part in ids[:, :149].split(16, dim=1):
                model(part, **{cache_name(model): batch})
        assert contender.costs(model, batch, batch.report()) == {
            key: got[key] for key in ("compactions", "kv_bytes", "statistics_bytes")
        }


def most_of_window(window):
    """Slots that a sliding layer uses at most, in blocks of 16: the window and an interval."""
    return -(-min(149, window - 1 + SMALL["interval"]) // 16) * 16


def test_an_answer_starts_with_the_first_token_that_differs(folder):
    tokenizer = Subject(str(folder / "model")).tokenizer
    made = example("recall", 80, 0, lambda text: len(tokenizer(text).input_ids))
    ids, count = encoded(tokenizer, made)
    assert tokenizer.decode(ids[:count]) == tokenizer.decode(tokenizer(made.text).input_ids)
    assert ids[count:].tolist() == tokenizer(made.answer).input_ids


COSTS = {"kv_bytes": 5, "statistics_bytes": 2}


def record(task, tokens, contender, hits, of, seed=0):
    key = {
        "task": task,
        "tokens": tokens,
        "model": "m",
        "adapter": None,
        "seed": seed,
    } | contender.key
    return key, {"hits": hits, "answer_tokens": of, "compactions": 1} | COSTS


def test_lengths_at_which_the_full_cache_fails_are_left_out():
    small = Contender(64)
    records = [
        *(record("recall", 100, FULL, 3, 3, seed) for seed in range(3)),
        *(record("recall", 100, small, 3 - seed, 3, seed) for seed in range(3)),
        record("recall", 200, FULL, 2, 3),
        record("recall", 200, small, 3, 3),
        *(record("copying", 100, FULL, 9, 10, seed) for seed in range(2)),
        *(record("copying", 100, small, 4 + seed, 10, seed) for seed in range(2)),
    ]
    rows, notes = MemoryStudy(full_at_least=0.7).rows(records)
    found = {(row["task"], row["budget"]): row for row in rows}
    assert set(found) == {(t, b) for t in ("recall", "copying") for b in (None, 64)}
    assert found["recall", 64]["score"] == pytest.approx(1 / 3)  # one of three without an error
    assert found["recall", 64]["full_score"] == 1.0
    assert found["copying", 64]["score"] == pytest.approx(9 / 20)
    (note,) = notes
    assert "recall at 200 tokens" in note and "0.00" in note


def test_models_whose_folders_are_called_alike_are_told_apart():
    records = []
    for i, (path, adapter) in enumerate([("a/best", None), ("b/best", None), ("b/best", "c/lora")]):
        key, result = record("recall", 100, FULL, 3 - i, 3)
        records.append((key | {"model": path, "adapter": adapter}, result))
    rows = [row for row, _ in grouped(records)]
    assert [row["model"] for row in rows] == ["a/best", "b/best", "best + lora"]
    two = [(records[0][0] | {"options": {"interval": n}}, {}) for n in (32, 64)]
    assert len(grouped(two)) == 2


# Running.


def counted(works, calls):
    def wrap(work):
        def run_it(missing, advance):
            calls.extend(work.keys[i]["n"] for i in missing)
            return work.run(missing, advance)

        return Work(work.keys, run_it, work.size)

    return [wrap(work) for work in works]


def squares(*groups):
    return [
        Work(
            [{"n": n} for n in group],
            lambda missing, advance, group=group: [{"square": group[i] ** 2} for i in missing],
        )
        for group in groups
    ]


def test_after_a_crash_nothing_is_run_twice_and_the_results_are_the_same(tmp_path):
    works = squares([1, 2], [3], [4, 5], [6])
    expected = run(works, tmp_path / "whole")
    calls = []

    def crash(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(counted(works, calls), tmp_path / "broken", crash)
    assert calls == [1, 2, 3]
    file = tmp_path / "broken" / "results-0.jsonl"
    file.write_text(file.read_text() + '{"key": {"n": 4}, "resu')  # cut short by the crash
    assert run(counted(works, calls), tmp_path / "broken") == expected
    assert sorted(calls) == [1, 2, 3, 4, 5, 6]
    assert run(counted(works, calls), tmp_path / "broken") == expected
    assert len(calls) == 6
    more = run(counted(squares([1, 2, 7], [3]), calls), tmp_path / "broken")
    assert calls[6:] == [7] and [result["square"] for _, result in more] == [1, 4, 49, 9]


def test_every_process_reads_what_the_others_wrote(tmp_path):
    Journal(tmp_path, rank=1).write({"n": 3}, {"square": 9})
    calls = []
    got = run(counted(squares([2], [3]), calls), tmp_path)
    assert calls == [2] and [result["square"] for _, result in got] == [4, 9]


def test_progress_reaches_its_end(tmp_path):
    seen = []

    def slow(missing, advance):
        advance(3)
        advance(4)
        return [{}]

    run(
        [Work([{"n": 1}], slow, 10), Work([{"n": 2}], slow, 10)],
        tmp_path,
        lambda *at: seen.append(at),
    )
    assert seen == [(0, 20), (3, 20), (7, 20), (10, 20), (13, 20), (17, 20), (20, 20)]


def test_other_weights_under_the_same_path_are_another_subject(tmp_path):
    save_checkpoint(tmp_path / "model")
    before = Subject(str(tmp_path / "model")).key
    assert Subject(str(tmp_path / "model")).key == before
    save_checkpoint(tmp_path / "model")
    assert Subject(str(tmp_path / "model")).key != before


def test_an_adapter_of_another_model_is_named_with_what_it_was_made_for(folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = Subject(str(folder / "model"), device="cpu").model
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "lora")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert Subject(str(folder / "model"), str(tmp_path / "lora"), device="cpu").model
    build("qwen3").save_pretrained(tmp_path / "wider")
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=20))
    gpt.save_pretrained(tmp_path / "gpt")
    for name in ("wider", "gpt"):
        message = f"^adapter: .*lora does not fit .*{name} \\(made for .*model\\)$"
        with pytest.raises(ValueError, match=message):
            Subject(str(tmp_path / name), str(tmp_path / "lora"), device="cpu").model  # noqa: B018


# Studies end to end.


def test_a_fidelity_study_resumes_and_adds_contenders(folder, tmp_path):
    subject = Subject(str(folder / "model"), device="cpu")
    study = FidelityStudy(str(folder / "text.txt"), tokens=200, windows=2, prompt=40, step=8)
    some = [Contender(64, scorer, SMALL) for scorer in ("knorm", "centroid")]
    first = run(list(study.works(subject, some[:1])), tmp_path)
    both = run(list(study.works(subject, some)), tmp_path)
    assert len((tmp_path / "results-0.jsonl").read_text().splitlines()) == 4
    assert [pair for pair in both if pair[0]["scorer"] == "knorm"] == first
    rows, _ = study.rows(both)
    assert [row["scorer"] for row in rows] == ["knorm", "centroid"]
    for row in rows:
        assert row["kl_low"] < row["kl"] < row["kl_high"] and 0 < row["mass"] < 1
        assert row["budget"] == 64 and row["compactions"] >= 3
        nll = [result["nll_full"] for key, result in both if key["scorer"] == row["scorer"]]
        assert row["full_perplexity"] == pytest.approx(math.exp(sum(nll) / len(nll)))
    with pytest.raises(ValueError, match=r"tokens: at most .* expected, as in .*, got 10000"):
        list(FidelityStudy(str(folder / "text.txt"), tokens=10_000).works(subject, some))


def test_a_short_text_is_taken_whole_and_the_table_says_so(folder, tmp_path):
    subject = Subject(str(folder / "model"), device="cpu")
    words = (folder / "text.txt").read_text().split()[:150]
    (tmp_path / "short.txt").write_text(" ".join(words))
    study = FidelityStudy(str(tmp_path / "short.txt"), prompt=16, step=8)
    count = len(subject.tokenizer(" ".join(words)).input_ids)
    some = Contender.grid([48, 64, 512], ["knorm"], **SMALL)
    rows, notes = study.rows(run(list(study.works(subject, some)), tmp_path))
    assert {row["tokens"] for row in rows} == {count}
    starts = [80, 96, 16]  # the first compaction; behind the prompt where there is none
    assert [row["positions"] for row in rows] == [count - 1 - start for start in starts]
    assert notes[0].startswith(f"short.txt: all of its {count} tokens, fewer than the usual 4,096")
    assert "positions differ" in notes[1] and len(notes) == 2
    exact = FidelityStudy(study.data, count, prompt=16, step=8)
    alike = [Contender(64, scorer, SMALL) for scorer in ("knorm", "centroid")]
    assert exact.rows(run(list(exact.works(subject, alike)), tmp_path))[1] == []


def test_sampled_answers_and_their_pass_at_k_are_counted(folder, tmp_path):
    subject = Subject(str(folder / "model"), device="cpu")
    study = TaskStudy(
        "q", load_problems(str(folder / "questions.jsonl")), 6, 4, (0, 1, 2), 1.0, 0.9, ks=(1, 3)
    )
    records = run(list(study.works(subject, [FULL])), tmp_path)
    assert len(records) == 6  # two batches, three seeds
    texts = Counter(answer["text"] for _, result in records for answer in result["problems"])
    assert len(texts) > 6
    (row,), (asked, note) = study.rows(records)
    assert asked == r"asked: 'Question: {question}\nAnswer:'; --template changes it"
    assert row["problems"] == len(QUESTIONS) == 6 and row["seeds"] == 3
    assert row["pass@3"] >= row["accuracy"] and 1 <= row["mean_tokens"] <= 6
    assert "3 by math-verify, 3 by string" in note
    again = run(list(study.works(subject, [FULL])), tmp_path / "again")
    assert again == records


CHAT = "{% for turn in messages %}<user> {{ turn['content'] }} <model>{% endfor %}"


def test_questions_of_ones_own_are_asked_as_they_are(folder, tmp_path, monkeypatch):
    """Only data sets of the hub come with a request to reason; every answer tells what for."""
    import datasets

    file, lines = folder / "questions.jsonl", [{"question": "1 + 1 ?", "answer": "#### 2"}]
    own = load_problems(str(file))[:1]
    monkeypatch.setattr(datasets, "load_dataset", lambda *about, **options: lines)
    hub = load_problems("openai/gsm8k:main")
    plain, chat = (Subject(str(folder / "model"), device="cpu") for _ in range(2))
    chat.tokenizer.chat_template = CHAT
    reason = "Reason step by step, and put your final answer within \\boxed{}."
    first = QUESTIONS[0]["question"]
    for subject, problems, template, text in (
        (plain, own, None, f"Question: {first}\nAnswer:"),
        (plain, hub, None, "Question: 1 + 1 ?\nAnswer:"),
        (chat, own, None, f"<user> {first} <model>"),
        (chat, hub, None, f"<user> 1 + 1 ?\n\n{reason} <model>"),
        (chat, hub, "{question} Be short.", "<user> 1 + 1 ? Be short. <model>"),
    ):
        study = TaskStudy("q", problems, 2, template=template)
        assert study.asked(subject.tokenizer, problems[0]) == text
    keys = {
        json.dumps(work.keys, sort_keys=True)
        for subject in (plain, chat)
        for problems in (own, [replace(own[0], template="{question} !")])
        for work in TaskStudy("q", problems, 2).works(subject, [FULL])
    }
    assert len(keys) == 3  # the plain model is asked the same twice
    study = TaskStudy("q", own, 2)
    records = run(list(study.works(chat, [FULL])), tmp_path)
    _, notes = study.rows(records)
    assert notes[0] == "asked: '{question}' in the chat template; --template changes it"
    (answer,) = records[0][1]["problems"]
    assert (answer["question"], answer["expected"]) == (first, QUESTIONS[0]["answer"])


def test_evaluate_returns_what_it_writes(folder, tmp_path):
    pytest.importorskip("matplotlib")
    subject = Subject(str(folder / "model"), device="cpu")
    study = TaskStudy("q", load_problems(str(folder / "questions.jsonl")), 4, 3)
    contenders = Contender.grid([64, None], ["knorm"], **SMALL)
    found = evaluate(study, subject, contenders, tmp_path, progress=False)
    assert [row["budget"] for row in found.rows] == [None, 64] and found.is_main
    written = {"rows": found.rows, "notes": found.notes}
    assert json.loads((tmp_path / "tasks.json").read_text()) == written
    assert (tmp_path / "tasks.md").read_text().strip() == str(found)
    assert "compactions are 0, nothing was evicted (budgets 64)" in found.notes[-1]
    full, roomy = found.rows
    block = 16 * Footprint.from_pretrained(str(folder / "model")).bytes_per_token
    assert full["kv_bytes"] <= roomy["kv_bytes"] <= full["kv_bytes"] + block
    assert full["statistics_bytes"] == roomy["statistics_bytes"] == 0  # knorm needs none
    assert len(found.files) == 7 and all(path.stat().st_size > 0 for path in found.files)
    assert "model" not in subject.__dict__  # its weights are let go
    tables = evaluate(study, [subject], contenders, tmp_path, plot=False, progress=False)
    assert tables.rows == found.rows and tables.files == found.files[:3]
    assert len((tmp_path / "results-0.jsonl").read_text().splitlines()) == 4  # nothing anew
    with pytest.raises(ValueError, match="scorer: one of"):
        evaluate(study, Subject("nowhere"), [Contender(64, "oracle", SMALL)], tmp_path)


def test_a_grid_has_every_scorer_at_every_budget_and_the_full_cache_once():
    grid = Contender.grid([64, None, 128], ["knorm", "oracle"], **SMALL)
    names = ["full", "knorm 64", "oracle 64", "knorm 128", "oracle 128"]
    assert [contender.name for contender in grid] == names
    for contender in grid:
        contender.check(oracle=True)
    with pytest.raises(ValueError, match="budget: at least"):
        Contender.grid([0], **SMALL)[0].check()


def test_one_row_of_a_batch_is_what_it_is_alone(folder, tmp_path):
    subject = Subject(str(folder / "model"), device="cpu", dtype="float32")
    problems = load_problems(str(folder / "questions.jsonl"))
    texts = {}
    for size in (1, 6):
        study = TaskStudy("q", problems, 12, size, template="{question} the")
        records = run(list(study.works(subject, [FULL])), tmp_path / str(size))
        texts[size] = [a["text"] for _, result in records for a in result["problems"]]
    assert texts[1] == texts[6]


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="seeds: one expected with temperature 0"):
        TaskStudy("q", [], seeds=(0, 1))
    with pytest.raises(ValueError, match="ks: 1 to the number of seeds"):
        TaskStudy("q", [], seeds=(0, 1), temperature=1.0, ks=(3,))
    with pytest.raises(ValueError, match="template"):
        TaskStudy("q", [], template="hello")


# Tables.

ROWS = [
    {"model": "m", "budget": None, "scorer": "-", "accuracy": 0.5, "accuracy_low": 0.4,
     "accuracy_high": 0.6, "mass": None, "full_perplexity": 25.93, "delta_perplexity": 0.0,
     "by_layer": [1, 2], "kv_bytes": 2**21},
    {"model": "m", "budget": 64, "scorer": "knorm", "accuracy": 0.25, "accuracy_low": None,
     "accuracy_high": None, "mass": 0.125, "full_perplexity": 25.93, "delta_perplexity": 3.81,
     "by_layer": [3], "kv_bytes": 2**20},
]  # fmt: skip


def test_a_table_of_every_column_fits_a_terminal():
    console = pytest.importorskip("rich.console").Console(
        width=100, record=True, file=io.StringIO()
    )
    row = {"model": "a-model-of-thirty-letters + lora", "task": "text.txt", "tokens": 4096}
    measured = {"kl": 0.0615, "kl_low": 0.024, "kl_high": 0.099, "full_perplexity": 25.93}
    measured |= {"delta_perplexity": 3.81, "top1": 0.83, "attention_error": 0.237, "mass": 0.912}
    measured |= {"mass_to_oracle": 0.953, "compactions": 12.5}
    measured |= {"kv_bytes": 45_700_000, "statistics_bytes": 9_400_000}
    rows = [
        row | {"budget": budget, "scorer": "streaming", "positions": 4000 - budget} | measured
        for budget in (512, 1024)
    ]
    console.print(terminal(rows))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    found = [line.split() for line in text.splitlines() if "streaming" in line]
    cells = "0.0615 [0.024, 0.099] 25.9 +3.8 0.83 0.237 0.912 0.953 12.5 43.6 8.96"
    lines = [f"512 streaming 3488 {cells}", f"1024 streaming 2976 {cells}"]
    assert found == [line.split() for line in lines]


def test_tables_say_the_same_in_every_form(tmp_path):
    lines = markdown(ROWS).splitlines()
    assert (
        lines[0] == "| model | budget | scorer | accuracy | mass | perplexity | KV per text, MiB |"
    )
    assert lines[2:] == [
        "| m | full | - | 0.5 [0.4, 0.6] | - | 25.9 +0 | 2 |",
        "| m | 64 | knorm | 0.25 | 0.125 | 25.9 +3.8 | 1 |",
    ]
    read = list(csv.DictReader(io.StringIO(comma_separated(ROWS))))
    assert [row["accuracy"] for row in read] == ["0.5", "0.25"] and read[0]["mass"] == ""
    assert [row["delta_perplexity"] for row in read] == ["0.0", "3.81"]
    assert read[0]["full_perplexity"] == "25.93" and "by_layer" not in read[0]
    save(ROWS, ["a note"], tmp_path / "new", "tasks")
    assert json.loads((tmp_path / "new" / "tasks.json").read_text()) == {
        "rows": ROWS,
        "notes": ["a note"],
    }
    assert (tmp_path / "new" / "tasks.md").read_text() == markdown(ROWS) + "\n\na note\n"
