"""A watch records what the cache holds at each token, and shows it when and where it should."""

import gc
import io
import sys
import types

import pytest
import torch
from families import family
from helpers import Text, small_cache
from rich.console import Console
from tiny import build, cache_name, generate, prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

import kvpage.watch
from kvpage import PagedCompactCache, Watch
from kvpage.transcript import Transcript

SETTINGS = {"budget": 64, "interval": 24, "recent": 16}
NUMBERS = ("seen_tokens", "live_tokens", "blocks_used", "blocks_freed", "bytes_in_use")
WORDS = "naïve 漢字 café 🌍🚀 don't stop . , ! <b>ไทย\n\n  two"


class Letters:
    """A tokenizer that knows each id as a letter; 0 is a special token."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(160 + i) for i in token_ids if i or not skip_special_tokens)


class Interrupt(LogitsProcessor):
    """Ctrl-C as the token after `tokens` is decoded."""

    def __init__(self, tokens):
        self.left = tokens

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return scores


class Screen:
    """Stands in for IPython: keeps what is displayed, one list for each display."""

    def __init__(self, monkeypatch):
        self.shown = []
        module = types.ModuleType("IPython.display")
        module.HTML, module.display = str, self._display
        monkeypatch.setitem(sys.modules, "IPython.display", module)

    def _display(self, html, display_id):
        assert display_id is True
        updates = [html]
        self.shown.append(updates)
        return types.SimpleNamespace(update=updates.append)


class Clock:
    """Stands in for `time` in the watch: stands still unless told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(kvpage.watch, "time", self)

    def perf_counter(self):
        return self.now


def decode_by_hand(model, ids, cache, tokens, **inputs):
    """Greedy decoding without `generate`: the ids, and a report after each forward."""
    reports, new, mask = [], ids, inputs.get("attention_mask", torch.ones_like(ids))
    for _ in range(tokens):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new.shape[1] :]
        with torch.no_grad():
            out = model(
                new, attention_mask=mask, position_ids=positions, **{cache_name(model): cache}
            )
        reports.append(cache.report())
        if model.generation_config.eos_token_id is not None:  # `generate` here bars it
            out.logits[..., model.generation_config.eos_token_id] = -torch.inf
        new = out.logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
        mask = torch.cat((mask, torch.ones_like(new)), dim=1)
    return ids, reports


@pytest.mark.core
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "qwen3-next"])
@pytest.mark.parametrize("batch", [1, 2])
def test_history_has_the_numbers_that_a_report_after_each_forward_gives(name, batch):
    model, ids = family(name), prompt(20, batch)
    mask = torch.ones_like(ids)
    mask[0, : 5 * (batch - 1)] = 0
    by_hand, reports = decode_by_hand(
        model, ids * mask, PagedCompactCache(**SETTINGS), 100, attention_mask=mask
    )
    cache = PagedCompactCache(**SETTINGS)
    watch = Watch(cache, display="none")
    out, _ = generate(model, ids * mask, cache, 100, attention_mask=mask, streamer=watch)
    assert torch.equal(out, by_hand)
    assert watch.token_ids == out[0, 20:].tolist()
    history, sliding_only = watch.history, reports[0].full_layers == 0
    assert len(history) == len(history.seconds) == 100
    assert history.seconds == sorted(history.seconds) and history.seconds[0] > 0
    for number in NUMBERS:
        of_report = f"sliding_{number}" if sliding_only and "blocks" in number else number
        expected = [getattr(report, of_report) for report in reports]
        assert getattr(history, number) == expected, number
    if not sliding_only:
        assert history.num_blocks == [r.blocks_used + r.blocks_free for r in reports]
        assert history.blocks_freed[-1] > 0


def test_bytes_of_a_fork_are_those_of_the_blocks_that_are_held():
    text, cache = Text(200), small_cache()
    text.feed(cache, 40)
    each = cache.usage().bytes_in_use // cache.usage().blocks_used
    (twin,) = cache.fork(1)
    for _ in range(130):
        text.feed(twin, 1)
        for one in (cache, twin):
            usage, report = one.usage(), one.report()
            assert usage.bytes_in_use == report.bytes_in_use == each * report.blocks_used
            assert (usage.seen_tokens, usage.live_tokens) == (
                report.seen_tokens,
                report.live_tokens,
            )
    cache.reset()
    assert cache.usage() == (0, 0, 0, 0, 0, 0)


def test_usage_asked_before_the_first_token_is_right_after_it():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SETTINGS)
    assert cache.usage().bytes_in_use == 0
    generate(model, prompt(20), cache, 5)
    assert cache.usage().bytes_in_use == cache.report().bytes_in_use > 0


def test_a_token_costs_no_loop_over_the_layers(monkeypatch):
    summed = []
    count = kvpage.usage.bytes_in_block
    monkeypatch.setattr(
        kvpage.usage, "bytes_in_block", lambda layer: summed.append(0) or count(layer)
    )
    cache = PagedCompactCache(**SETTINGS)
    generate(
        build("llama-gqa3-tied"), prompt(20), cache, 150, streamer=Watch(cache, display="none")
    )
    assert len(summed) == 3  # once for each layer


@pytest.mark.core
def test_assisted_decoding_gives_several_tokens_at_once():
    model, ids = build("llama-gqa3-tied"), prompt(12).repeat(1, 3)
    plain = PagedCompactCache(**SETTINGS)
    expected, _ = generate(model, ids, plain, 100)
    cache, puts = PagedCompactCache(**SETTINGS), []
    watch = Watch(cache, Letters(), display="none")
    put = watch.put
    watch.put = lambda value: puts.append(value.shape) or put(value)
    out, _ = generate(model, ids, cache, 100, streamer=watch, prompt_lookup_num_tokens=4)
    assert torch.equal(out, expected)
    assert max(shape[-1] for shape in puts[1:]) > 1
    assert watch.token_ids == expected[0, 36:].tolist()
    assert watch.text == Letters().decode(watch.token_ids, skip_special_tokens=True)
    assert len(watch.history) == 100


def test_sampling_is_watched_and_the_text_is_that_of_the_tokens():
    model, cache = build("qwen2"), PagedCompactCache(**SETTINGS)
    watch = Watch(cache, Letters(), display="none")
    torch.manual_seed(1)
    arguments = {cache_name(model): cache, "max_new_tokens": 50, "do_sample": True}
    out = model.generate(prompt(9), streamer=watch, **arguments)
    assert watch.token_ids == out[0, 9:].tolist()
    assert watch.text == Letters().decode(watch.token_ids, skip_special_tokens=True)


def test_turns_are_appended_and_each_has_a_display(monkeypatch):
    screen, model = Screen(monkeypatch), build("llama-gqa3-tied")
    cache = PagedCompactCache(**SETTINGS)
    watch = Watch(cache, Letters(), display="notebook", every=3600)
    first, _ = generate(model, prompt(20), cache, 30, streamer=watch)
    ids = torch.cat((first, prompt(7, seed=1)), dim=1)
    second, _ = generate(model, ids, cache, 90, streamer=watch)
    turns = [first[0, 20:].tolist(), second[0, 57:].tolist()]
    assert watch.token_ids == turns[0] + turns[1]
    assert watch.text == "\n\n".join(Letters().decode(turn, True) for turn in turns)
    assert len(watch.history) == 120
    assert watch.history.seen_tokens == [*range(20, 50), *range(57, 147)]
    assert watch.history.seconds == sorted(watch.history.seconds)
    prompts, ends = zip(*((updates[0], updates[-1]) for updates in screen.shown), strict=True)
    assert all("reading the prompt: 0 tokens" in html for html in prompts)
    assert "done: 30 tokens" in ends[0] and "done: 90 tokens" in ends[1]
    report = cache.report()
    assert f"{report.seen_tokens} seen, {report.live_tokens} live" in ends[1]


def test_a_turn_that_was_shown_keeps_its_numbers_whatever_becomes_of_the_cache(monkeypatch):
    screen, text, cache = Screen(monkeypatch), Text(60), small_cache()
    watch = Watch(cache, Letters(), display="notebook", every=0)
    watch.put(torch.zeros(1, 10, dtype=torch.long))
    for token in range(20):
        text.feed(cache, 1)
        watch.put(torch.tensor([token]))
    cache.reset()  # as after an interrupt
    assert "20 seen, 20 live" in watch._repr_html_()
    watch.put(torch.zeros(1, 10, dtype=torch.long))
    assert "stopped: 20 tokens" in screen.shown[0][-1] and "20 seen" in screen.shown[0][-1]
    assert "0 seen, 0 live" in screen.shown[1][-1]


@pytest.mark.parametrize("every", [0, 1.0, 2.5])
def test_a_display_is_updated_no_oftener_than_asked_and_at_the_end(monkeypatch, every):
    clock, screen = Clock(monkeypatch), Screen(monkeypatch)
    text, cache = Text(200), small_cache()
    watch = Watch(cache, Letters(), display="notebook", every=every)
    watch.put(torch.zeros(1, 10, dtype=torch.long))
    for token in range(1, 41):
        text.feed(cache, 1)
        clock.now += 0.25
        watch.put(torch.tensor([token]))
    (updates,) = screen.shown
    expected = {0: 1 + 40, 1.0: 1 + 10, 2.5: 1 + 4}[every]
    assert len(updates) == expected
    assert watch.tokens_per_second == 4.0
    watch.end()
    watch.end()
    assert len(updates) == expected + 1
    assert "done: 40 tokens" in updates[-1] and "4.0 tokens/s" in updates[-1]
    assert "40 seen, 40 live" in updates[-1] and chr(200) in updates[-1]


def test_speed_is_that_of_the_last_64_tokens_of_the_turn(monkeypatch):
    clock, text, cache = Clock(monkeypatch), Text(300), small_cache()
    watch = Watch(cache, display="none")
    for turn_seconds in (9.0, 0.5):
        watch.put(torch.zeros(1, 10, dtype=torch.long))
        assert watch.tokens_per_second != watch.tokens_per_second  # NaN: no two tokens yet
        for i in range(100):
            text.feed(cache, 1)
            clock.now += 50 if i < 36 else turn_seconds
            watch.put(torch.tensor([1]))
        watch.end()
        assert watch.tokens_per_second == 1 / turn_seconds
        clock.now += 1000


def test_an_interrupt_leaves_the_last_state_and_the_watch_goes_on(monkeypatch):
    screen, model = Screen(monkeypatch), build("llama-gqa3-tied")
    cache = PagedCompactCache(**SETTINGS)
    watch = Watch(cache, Letters(), display="notebook", every=3600)
    stop = {"logits_processor": LogitsProcessorList([Interrupt(70)])}
    with pytest.raises(KeyboardInterrupt), watch:
        generate(model, prompt(20), cache, 90, streamer=watch, **stop)
    assert len(watch.token_ids) == len(watch.history) == 70
    assert "stopped by KeyboardInterrupt: 70 tokens" in screen.shown[0][-1]
    assert "stopped by KeyboardInterrupt" in repr(watch)
    with pytest.raises(KeyboardInterrupt):  # without `with`: known at the next prompt
        cache.reset()
        generate(model, prompt(20), cache, 90, streamer=watch, **stop | {
            "logits_processor": LogitsProcessorList([Interrupt(5)])})  # fmt: skip
    cache.reset()
    generate(model, prompt(20), cache, 3, streamer=watch)
    assert "stopped: 5 tokens" in screen.shown[1][-1]
    assert "done: 3 tokens" in screen.shown[2][-1]
    assert len(watch.token_ids) == 78


def test_of_several_rows_the_first_is_shown_and_that_is_said(monkeypatch):
    screen, cache = Screen(monkeypatch), PagedCompactCache(**SETTINGS)
    watch = Watch(cache, Letters(), display="notebook")
    out, _ = generate(build("llama-gqa3-tied"), prompt(20, 3), cache, 10, streamer=watch)
    assert watch.token_ids == out[0, 20:].tolist()
    assert "10 tokens in each of 3 rows" in screen.shown[0][-1]
    assert "row 0 of 3:" in screen.shown[0][-1]


def tokenizer_of(kind):
    """A byte-level or a sentencepiece-like tokenizer with few tokens, trained on nothing much."""
    special = ["<unk>", "<|end|>"]
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(["two words and more words"], trainer)
    else:
        pieces = [*special, *(f"<0x{i:02X}>" for i in range(256)), "\u2581two", "\u2581", "o", "s"]
        tokenizer = Tokenizer(
            models.BPE(
                {piece: i for i, piece in enumerate(pieces)},
                [],
                byte_fallback=True,
                unk_token="<unk>",
            )
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>"
    )


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_text_streams_in_whole_characters_and_ends_as_the_tokenizer_decodes_it(kind, at_once):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(WORDS, add_special_tokens=False)
    ids = [*ids[:40], tokenizer.eos_token_id, *ids[40:], tokenizer.eos_token_id]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.strip() == WORDS and len(ids) > len(WORDS)
    transcript, read = Transcript(tokenizer), ""
    for start in range(0, len(ids), at_once):
        transcript.token_ids += ids[start : start + at_once]
        read += transcript.read()
        assert read == transcript.read_so_far == whole[: len(read)] and "\ufffd" not in read
    assert read + transcript.rest() == whole
    transcript.finish()
    assert transcript.read_so_far == whole


def test_a_character_never_completed_is_shown_at_the_end():
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("a\U0001f30d", add_special_tokens=False)[:-1]
    transcript = Transcript(tokenizer)
    transcript.token_ids += ids
    assert transcript.read() == ""
    transcript.finish()
    assert transcript.read_so_far == tokenizer.decode(ids)


def terminal(text_file, **options):
    return Console(file=text_file, width=60, height=14, **{"force_terminal": True} | options)


def test_a_terminal_shows_a_meter_and_the_end_of_the_text_then_all_of_it():
    screen, text, cache = io.StringIO(), Text(400), small_cache()
    watch = Watch(cache, Letters(), every=0, console=terminal(screen, color_system=None))
    assert watch.display == "terminal"
    watch.put(torch.zeros(1, 10, dtype=torch.long))
    token_ids = [1 + i % 90 for i in range(180)] * 6
    for token in token_ids[:300]:
        text.feed(cache, 1)
        watch.put(torch.tensor([token]))
    for token in token_ids[300:]:
        watch.put(torch.tensor([token]))
    frames = screen.getvalue().split("decoding: ")
    assert len(frames) == 1 + len(token_ids)
    assert max(frame.count("\n") for frame in frames) < 14
    screen.seek(0)
    screen.truncate()
    watch.end()
    final, report = screen.getvalue(), cache.report()
    counts = report.blocks_used, report.blocks_free, report.blocks_freed
    assert "█" * counts[0] + "▒" * counts[1] + "·" * counts[2] + "\n" in final.replace(" ", "")
    assert f"{counts[0]} blocks used, {counts[1]} free, {counts[2]} freed" in final
    assert Letters().decode(token_ids) in final.replace("\n", "")
    assert final.endswith("\x1b[?25h")  # the cursor is there again


def test_a_pipe_gets_the_last_state_alone():
    pipe, text, cache = io.StringIO(), Text(40), small_cache()
    watch = Watch(cache, every=0, console=terminal(pipe, force_terminal=False))
    with watch:
        watch.put(torch.zeros(1, 10, dtype=torch.long))
        for token in range(5):
            text.feed(cache, 1)
            watch.put(torch.tensor([token]))
        assert pipe.getvalue() == ""
    assert pipe.getvalue().startswith("done: 5 tokens") and "\x1b" not in pipe.getvalue()


def test_a_watch_that_is_dropped_gives_the_terminal_back():
    screen, cache = io.StringIO(), small_cache()
    watch = Watch(cache, console=terminal(screen))
    watch.put(torch.zeros(1, 10, dtype=torch.long))
    assert screen.getvalue().count("\x1b[?25l") == 1 and "\x1b[?25h" not in screen.getvalue()
    del watch
    gc.collect()
    assert screen.getvalue().count("\x1b[?25h") == 1


def test_auto_takes_the_display_that_is_there(monkeypatch):
    Screen(monkeypatch)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    streams = types.SimpleNamespace(isatty=lambda: False)
    monkeypatch.setattr(sys, "stdout", streams)
    monkeypatch.setattr(sys, "stderr", streams)
    assert "display=none: no prompt yet" in repr(Watch(small_cache()))
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True))
    assert "display=terminal" in repr(Watch(small_cache()))
    monkeypatch.setattr(kvpage.displays, "find_spec", lambda name: None)
    assert "display=none" in repr(Watch(small_cache()))
    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    assert "display=notebook" in repr(Watch(small_cache()))


@pytest.mark.parametrize(
    ("display", "module", "extra"),
    [("notebook", "IPython.display", "notebooks"), ("terminal", "rich.console", "cli")],
)
def test_what_is_not_installed_is_named(monkeypatch, display, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'kvpage\[{extra}\]'"):
        Watch(small_cache(), display=display)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache": DynamicCache()}, TypeError, "a PagedCompactCache expected, got DynamicCache"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer: .* got str"),
        ({"display": "tv"}, ValueError, "display: .* got 'tv'"),
        ({"every": -1}, ValueError, "every: .* got -1"),
        ({"every": "1"}, ValueError, "every: .* got '1'"),
        ({"display": "none", "console": Console()}, ValueError, "console: .* got display='none'"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Watch(**{"cache": small_cache()} | arguments)


def test_a_watch_on_another_cache_than_the_one_in_use_says_so():
    model, used = build("llama-gqa3-tied"), PagedCompactCache(**SETTINGS)
    with pytest.raises(ValueError, match="the one that generate is given"):
        generate(model, prompt(5), used, 3, streamer=Watch(small_cache(), display="none"))
    with pytest.raises(ValueError, match="tokenizer: one expected"):
        _ = Watch(used, display="none").text
