"""What "equal" means (README, "What exact means"): float64 identical; float32 identical up to the first near-tie of the decision."""
import torch

from hbsjd.decoding.noise import SHARED, gumbel, row_keys

NEAR = 1e-4


def assert_same(model, condition, got, want, seed: int, images=None):
    """`got` and `want` are rollouts of the same images by an exact method and by autoregressive decoding; `model` is guided as they were."""
    differs = got.tokens != want.tokens
    assert torch.equal(got.start, want.start)
    if want.tokens.numel() and next(iter(model_parameters(model))).dtype == torch.float64:
        assert not differs.any(), f"first differences at {differs.nonzero()[:5].tolist()}"
    for row in differs.any(1).nonzero()[:, 0].tolist():
        position = int(differs[row].nonzero()[0])
        assert gap(model, condition[row], want.tokens[row], position, want.policy.mode, seed, row if images is None else int(images[row])) < NEAR


@torch.no_grad()
def gap(model, condition, tokens_T, position: int, mode: str, seed: int, image: int) -> float:
    """Distance between the two best candidates at a position, noise included."""
    logits = model(condition[None], tokens_T[None])[0, position].double()
    if mode == "sample":
        logits = logits + gumbel(row_keys(seed, SHARED, torch.tensor(image), torch.tensor(position)), len(logits))
    best, second = logits.topk(2).values
    return float(best - second)


def model_parameters(model):
    return model.model.parameters() if type(model).__name__ == "Guided" else model.parameters()
