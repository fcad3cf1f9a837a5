"""A tiny checkpoint with a tokenizer, and a LoRA adapter trained on a jsonl, as users have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tiny import COMMON, HEADS_3, perturbed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvpage.evaluation.memory import COLOURS, FILLER, NOUNS
from kvpage.evaluation.tasks import PLAIN_TEMPLATE

QUESTIONS = [
    {"question": f"Which one is the {colour} one ?", "answer": answer}
    for colour, answer in zip(COLOURS[:6], ("apple", "river", "7", "42", "stone", "9"), strict=True)
]
NUMBERS = " ".join(map(str, range(300)))
WORDS = " ".join(
    [
        *(*NOUNS, *COLOURS, *FILLER, *(f"{q['question']} {q['answer']}" for q in QUESTIONS)),
        *("Question: Answer: The code of the is . root list same again path from to here", NUMBERS),
    ]
)


def save_checkpoint(folder: Path) -> Path:
    """A random model of three layers and a tokenizer of whole words, saved in `folder`."""
    split = pre_tokenizers.Whitespace()
    words = list(dict.fromkeys(word for word, _ in split.pre_tokenize_str(WORDS)))
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": len(vocabulary), "eos_token_id": 1, "tie_word_embeddings": False}
    model = perturbed(LlamaForCausalLM(LlamaConfig(**(COMMON | HEADS_3 | sizes))))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_questions(file: Path) -> Path:
    """`QUESTIONS` as a .jsonl."""
    file.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return file


def train_adapter(checkpoint: Path, data: Path, folder: Path, steps: int = 80) -> Path:
    """A LoRA adapter that learnt the answers in `data`, saved in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    asked = tokenizer([PLAIN_TEMPLATE.replace("{question}", q["question"]) for q in lines])
    answers = torch.tensor(tokenizer([line["answer"] for line in lines]).input_ids)  # a token each
    ends = torch.full_like(answers, tokenizer.eos_token_id)
    targets = torch.cat([answers, ends], dim=1)
    ids = torch.cat([torch.tensor(asked.input_ids), targets], dim=1)
    for _ in range(steps):
        logits = model(ids).logits[:, -3:-1]
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
