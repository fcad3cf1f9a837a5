"""The plot of decode.py in docs/results.md: time per token against seen tokens."""

from __future__ import annotations

from pathlib import Path

from contenders import DYNAMIC, FLOOR, PAGED, STATIC
from decode_report import Run

COLOURS = {DYNAMIC: "#d1242f", STATIC: "#bc6c00", PAGED: "#8250df", FLOOR: "#6e7781"}
BOUNDED_COLOURS = ("#54aeff", "#0969da", "#0a3069")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvpage",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def check_matplotlib() -> None:
    """`RuntimeError` that says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install -e '.[bench]'") from None


def draw(run: Run, path: Path, model: str) -> None:
    """Draw the float32 cells of batch 1 as SVG, the same file for the same figures."""
    check_matplotlib()
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    at = run.of("float32", 1)
    seen = sorted(at)
    ours = [name for name in run.names if name.startswith("budget=") and "kvpage" not in name]
    bounded = [name for name in ours if name != PAGED]
    colours = COLOURS | dict(zip(bounded, BOUNDED_COLOURS, strict=False))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.8), facecolor="white")
        for name in (DYNAMIC, STATIC, PAGED, *bounded, FLOOR):
            line = "--" if name == FLOOR else "-"
            times = [at[s].median_ms[name] for s in seen]
            axes.plot(seen, times, line, marker="o", ms=3, color=colours.get(name), label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(seen, [f"{s:,}" for s in seen])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.set_xlabel("seen tokens")
        axes.set_ylabel("ms per token")
        axes.set_title(f"{model}, float32, batch 1, one CPU thread", fontsize=10)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
