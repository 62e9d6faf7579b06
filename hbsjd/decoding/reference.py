"""The algorithm on one screen: one image, no cache, plain loops, Independent schedule. The specification that the batched loop is tested against.

It shares with the loop only the keyed noise and the sampling filters.
"""
from __future__ import annotations

import torch

from hbsjd.decoding.noise import COIN, DRAW, PICK, SHARED, gumbel, integers, row_keys, uniform
from hbsjd.decoding.sampling import scores
from hbsjd.decoding.types import Policy


def decode(model, condition: int, prefix: list[int], rule: str, W: int, H: int, length: int, seed: int, image: int, policy: Policy) -> list[int]:
    """The tokens of one image (prefix included) under rule "Greedy", "Gumbel", "Probabilistic" or "Maximal", with History(H) drafts."""
    V, tokens, drafts, own_round = model.config.vocab_size, list(prefix), [], 0

    def key(purpose, position, own_round=0):
        return row_keys(seed, purpose, torch.tensor(image), torch.tensor(position), own_round)

    while len(tokens) < length:
        start, remaining = len(tokens), length - len(tokens)
        width = min(W, remaining)

        # the window: predictions of the last round, then committed tokens H, 2 H, ... back, else uniform tokens; each with its q
        for j in range(len(drafts), width):
            source = start + j - H
            while source >= start:
                source -= H
            if source >= 0:
                drafts.append((tokens[source], one_hot(tokens[source], V)))
            else:
                drafts.append((int(integers(key(PICK, start + j, own_round), 1)) * V >> 32, torch.full((V,), 1 / V, dtype=torch.double)))
        drafts = drafts[:width]

        # one forward: prediction j stands where draft j stands
        sequence = (tokens + [token for token, _ in drafts] + [0])[:length]
        logits = model(torch.tensor([condition]), torch.tensor([sequence]))[0, start:]

        # verify from left to right; after the first draft that does not stand, predictions are only the next drafts
        predictions, accepted, standing = [], 0, True
        for j in range(min(width + 1, remaining)):
            score = scores(logits[j], policy)
            p = score.softmax(-1)
            draft, q = drafts[j] if j < width else (None, None)
            if rule in ("Greedy", "Gumbel"):
                token = int((score + (gumbel(key(SHARED, start + j), V).to(score.dtype) if rule == "Gumbel" else 0)).argmax())
                kept = token == draft
            else:
                tested = draft is not None and (standing or rule == "Maximal")
                kept = tested and bool(uniform(key(COIN, start + j, own_round), 1) < (p[draft] / q[draft]).clamp(max=1))
                residual = (p - q.to(p.dtype)).clamp(min=0) if tested else p
                weights = residual if residual.sum() > 0 else p
                token = draft if kept else int((weights.log() + gumbel(key(DRAW, start + j, own_round), V).to(p.dtype)).argmax())
            standing = standing and kept
            accepted += standing
            predictions.append((token, p))

        # commit the accepted drafts and the prediction after them; the rest is drafted again, with q = this round's p
        tokens += [token for token, _ in predictions[: accepted + 1]]
        drafts = predictions[accepted + 1 :]
        own_round += 1
    return tokens


def one_hot(token: int, V: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), V).double()
