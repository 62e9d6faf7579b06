"""What "equal" means (README, "What exact means"): float64 identical; float32 identical up to the first near-tie of the decision."""
import torch

from hbsjd.agreement import first_difference

NEAR = 1e-4


def assert_same(model, condition, got, want, seed: int, images=None):
    """`got` and `want` are rollouts of the same images by an exact method and by autoregressive decoding; `model` is guided as they were."""
    assert torch.equal(got.start, want.start)
    for row in range(len(condition)):
        image = row if images is None else int(images[row])
        position, gap = first_difference(model, condition[row], got.tokens[row], want.tokens[row], image, seed, want.policy.mode)
        if position is not None:
            double = next(model.model.parameters()).dtype == torch.float64
            assert not double and gap < NEAR, f"image {row} differs at {position}, {gap} from a tie"
