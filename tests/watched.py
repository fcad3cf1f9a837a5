"""A cache that notes what was fed to it and what came out, for the oracle."""

import torch
from tiny import cache_name

from kvpage import PagedCompactCache


class Watched(PagedCompactCache):
    """Notes ids, positions and logits of every forward, through reordering and crops."""

    def follow(self, model):
        self.notes = None

        def note(module, args, kwargs, output):
            if kwargs.get(cache_name(module)) is not self:
                return output
            ids = kwargs["input_ids"]
            new = [ids, kwargs["position_ids"].expand_as(ids), output.logits]
            old = self.notes or [part[:, :0] for part in new]
            self.notes = [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]
            self.mask = kwargs.get("attention_mask")
            return output

        return model.register_forward_hook(note, with_kwargs=True)

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.notes = [part[beam_idx] for part in self.notes]

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self.notes = [part[:, : self.get_seq_length()] for part in self.notes]


def all_logits(model):
    """Make `model` return logits for every new token, whatever `generate` asks for, until the
    handle that is returned is removed."""

    def ask(module, args, kwargs):
        return args, kwargs | {"logits_to_keep": 0}

    return model.register_forward_pre_hook(ask, with_kwargs=True)
