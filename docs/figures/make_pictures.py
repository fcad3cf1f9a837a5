"""Draws the pictures of docs/pictures.md: SmolLM2 writes 700 tokens in a budget of 256.

python docs/figures/make_pictures.py
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpage import BlockMap, PagedCompactCache, plot
from kvpage.watch import Watch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from long_trace import QUESTION
from small_models import fetch_smollm2

OUT = Path(__file__).parent / "pictures"
NEW_TOKENS, BUDGET = 700, 256


def main() -> None:
    folder = fetch_smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    cache = PagedCompactCache(model, budget=BUDGET)
    watch = Watch(cache, display="none")
    length = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    how = {"do_sample": False, "repetition_penalty": 1.1}
    ids = model.generate(**inputs, **length, **how, cache=cache, streamer=watch)[0]
    live = cache.live_positions(0)[0, 0]
    slots = torch.full((-(-cache.get_seq_length() // 16), 16), -1)
    slots.view(-1)[live] = live
    titles = ["Evicted, nothing moved", "Evicted and compacted"]
    figures = {
        "block_map": plot.block_map([BlockMap.of_slots(slots), cache], title=titles),
        "live_tokens": plot.live_tokens(watch.history, budget=BUDGET),
        "blocks_freed": plot.blocks_freed(watch.history),
        "survivors": plot.survivors(cache, [tokenizer.decode([i]) for i in ids.tolist()]),
        "centroids": plot.centroids(cache, layer_idx=10, head=3),
        "resultant_lengths": plot.resultant_lengths(cache),
    }
    OUT.mkdir(exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(OUT / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
