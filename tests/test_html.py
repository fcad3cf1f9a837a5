"""What notebooks show: well-formed, escaped, small, and with the numbers of the report."""

import re
from html.parser import HTMLParser

import pytest
import torch
from families import family
from helpers import Text, small_cache
from tiny import build, generate, prompt

from kvpage import PagedCompactCache, Survivors, Watch, html

VOID = {"br", "hr", "img"}


class Page(HTMLParser):
    """Elements `(tag, attributes, text in it)` in order of their start; raises where tags cross."""

    def __init__(self, source):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(source)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        assert tag not in VOID | {"script", "style"}
        self._open.append(len(self.elements))
        self.elements.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data):
        for index in self._open:
            self.elements[index][2] += data

    @property
    def text(self):
        return self.elements[0][2]

    def all(self, tag):
        return [element for element in self.elements if element[0] == tag]


class Letters:
    """A tokenizer whose token `i` is a piece of text of its own, `<script>` and `&` among them."""

    PIECES = ("<script>", "&", "\n", '"', " a", "</div>", "é", "&lt;")

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(self.PIECES[i % len(self.PIECES)] for i in token_ids)


def cells_of(page):
    """How many cells the strip shows of blocks used, free and freed."""
    (label,) = [a for _, a, _ in page.elements if a.get("role") == "img"]
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", label["aria-label"])]
    styles = [
        a["style"] for tag, a, _ in page.elements if tag == "i" and "height:12px" in a["style"]
    ]
    return numbers, [sum(mark in s for s in styles) for mark in (html.USED, html.FREE, html.FREED)]


def test_a_report_shows_the_same_rows_as_its_text():
    model, cache = build("llama-gqa3-tied"), PagedCompactCache(budget=64, interval=24, recent=16)
    generate(model, prompt(20), cache, 150)
    report = cache.report()
    page = Page(report._repr_html_())
    cells = [text for _, _, text in page.all("td")]
    printed = [line.strip().split("  ", 1) for line in str(report).splitlines()]
    assert cells == [part.strip() for line in printed for part in line]
    counts = [report.blocks_used, report.blocks_free, report.blocks_freed]
    assert cells_of(page) == (counts, counts)  # few enough for a cell each
    assert report.blocks_freed > 0


def test_names_and_values_of_a_table_are_escaped():
    page = Page(html.panel(html.heading("<b>", "&lt;"), html.table([("  a<i>", "x & </td>")])))
    assert page.text == "<b> · &lt;a<i>x & </td>"


def test_a_cache_shows_its_numbers():
    text, cache = Text(200, batch=2), small_cache()
    for count in (96, 1, 5):
        text.feed(cache, count)
    report, page = cache.report(), Page(cache._repr_html_())
    counts = [report.blocks_used, report.blocks_free, report.blocks_freed]
    assert cells_of(page) == (counts, counts)
    assert f"{report.seen_tokens} tokens seen · {report.live_tokens} live" in page.text
    assert "scorer=knorm" in page.text and "budget=64" in page.text


def test_a_cache_is_shown_in_whatever_state_it_is():
    cache = small_cache()
    assert "0 tokens seen" in Page(cache._repr_html_()).text
    assert "model" in Page(cache.report()._repr_html_()).text
    text = Text(80, layers=3)
    text.feed(cache, 40)
    cache.update(text.keys[0, :, :, 40:41], text.values[0, :, :, 40:41], 0)  # and not the others
    Page(cache._repr_html_())
    assert "1 live" in Page(Watch(cache, display="none")._repr_html_()).text
    cache.reset()
    assert "0 tokens seen" in Page(cache._repr_html_()).text


@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "qwen3-next"])
def test_every_kind_of_layer_is_shown(name):
    cache = PagedCompactCache(budget=64, interval=24, recent=16)
    generate(family(name), prompt(20), cache, 90)
    report, page = cache.report(), Page(cache._repr_html_())
    used = report.blocks_used or report.sliding_blocks_used
    assert cells_of(page)[0][0] == used > 0
    assert cache.usage().bytes_in_use == report.bytes_in_use


@pytest.mark.parametrize(
    "counts", [(0, 0, 0), (1, 0, 0), (3, 1, 90_000), (70_000, 1, 1), (33, 33, 33)]
)
def test_a_strip_stays_small_and_shows_what_there_is(counts):
    numbers, each = html.cells(counts, 96)
    assert sum(numbers) <= 96
    assert all((number > 0) == (count > 0) for number, count in zip(numbers, counts, strict=True))
    for number, count in zip(numbers, counts, strict=True):
        assert (number - 1) * each < count <= number * each or count == number == 0
    page = Page(html.strip(*counts))
    assert cells_of(page) == (list(counts), numbers)
    assert (f"a cell is {each:,} blocks" in Page(f"<p>{html.strip(*counts)}</p>").text) == (
        each > 1
    )


def test_greyed_text_is_escaped_and_fades_with_the_share():
    tokens = ["<script>", "&", "\n", '"é', "tail"]
    shares = [1.0, 0.0, 0.5, 0.01, None]
    source = html.greyed(tokens, shares)
    page = Page(source)
    assert page.text == "".join(tokens)
    spans = page.all("span")
    assert [text for *_, text in spans] == tokens
    titles = [attributes["title"] for _, attributes, _ in spans]
    assert titles == ["0: 100%", "1: 0%", "2: 50%", "3: 1%", "4: not cached yet"]
    opacity = [float(a.get("style", "opacity:1").removeprefix("opacity:")) for _, a, _ in spans]
    assert opacity[0] == opacity[4] == 1 > opacity[2] > opacity[3] > opacity[1] >= 0.3
    with pytest.raises(ValueError, match="one for each of 2 tokens, got 1"):
        html.greyed(["a", "b"], [1.0])


def test_greyed_neighbours_of_one_shade_are_one_element_and_long_texts_stay_small():
    page = Page(html.greyed(list("abcdef"), [1, 1, 0.49, 0.51, 0, 0]))
    found = [(attributes["title"], text) for _, attributes, text in page.all("span")]
    assert found == [("0–1: 100%", "ab"), ("2–3: 50%", "cd"), ("4–5: 0%", "ef")]
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(2_000, generator=generator).tolist()  # worse than any cache
    assert len(html.greyed([" word"] * 2_000, shares)) < 150_000


@pytest.mark.parametrize("padded", [False, True])
def test_survivors_have_the_share_of_layers_and_heads_in_which_each_token_lives(padded):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(budget=64, interval=24, recent=16, trace=True, scorer="random")
    ids = prompt(40, batch=2)
    pads = 19 * padded
    real = torch.ones_like(ids)
    real[0, :pads] = 0
    out, _ = generate(model, ids * real, cache, 151, attention_mask=real)
    for row, skipped in ((0, pads), (1, 0)):
        tokens = out[row, skipped:]
        survivors = Survivors.of(cache, tokens, Letters(), row=row)
        appended = set(range(184 - skipped, 190 - skipped))
        live = [
            set(head.tolist()) | appended
            for layer in cache.trace[-1].positions
            for head in layer[row]
        ]
        expected = [sum(t in head for head in live) / len(live) for t in range(190 - skipped)]
        assert survivors.pairs == len(live) == 6
        assert list(survivors.shares) == pytest.approx([*expected, None])
        assert any(0 < share < 1 for share in expected) and 0 in expected and 1 in expected
        assert "".join(survivors.pieces) == Letters().decode(tokens.tolist())
        page = Page(survivors._repr_html_())
        assert page.text.endswith("fainter" + "".join(survivors.pieces))
        assert f"{expected.count(0):,} in none" in page.text
        gone = [
            piece
            for piece, share in zip(survivors.pieces, survivors.shares, strict=True)
            if share != 0
        ]
        counted, _, text = str(survivors).partition(":\n\n")
        assert counted == survivors.summary
        assert text.replace(" […] ", "") == "".join(gone)
        Survivors.of(cache, tokens[:-1].tolist(), Letters(), row=row)


def test_survivors_refuse_what_does_not_fit():
    cache = small_cache()
    with pytest.raises(ValueError, match=r"row: within \[0, 0\) expected, got 0"):
        Survivors.of(cache, [1], Letters())
    Text(20).feed(cache, 20)
    for count in (19, 22):
        with pytest.raises(
            ValueError, match=f"the 20 cached tokens of row 0 expected.* got {count}"
        ):
            Survivors.of(cache, list(range(count)), Letters())
    with pytest.raises(ValueError, match=r"token_ids: ids \[T\]"):
        Survivors.of(cache, torch.zeros(1, 20, dtype=torch.long), Letters())
    windows = PagedCompactCache()
    generate(family("mistral-window"), prompt(20), windows, 3)
    with pytest.raises(ValueError, match="layers of full attention"):
        Survivors.of(windows, list(range(22)), Letters())
