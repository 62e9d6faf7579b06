"""The bundled student on real held-out prefixes (none included), guidance 2: exact in float64 settings, near-ties only in float32."""
import pytest
import torch
from equality import assert_same

import hbsjd
from hbsjd import data
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Compact, Full, Hybrid
from hbsjd.decoding.rules import Greedy, Gumbel
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.types import Method
from hbsjd.decoding.windows import Fixed
from hbsjd.models.guidance import Guided

LENGTH = 64  # of 256: enough for every switch, short enough for a test
SETTINGS = [  # every pair of values of two axes occurs once
    (Independent(), Full(), History(16), 16),
    (Independent(), Compact(), RepeatLeft(), 4),
    (Independent(), Hybrid(0.6), Uniform(), 1),
    (Synchronous(), Full(), RepeatLeft(), 1),
    (Synchronous(), Compact(), Uniform(), 16),
    (Synchronous(), Hybrid(0.6), History(16), 4),
    (Lockstep(), Full(), Uniform(), 4),
    (Lockstep(), Compact(), History(16), 1),
    (Lockstep(), Hybrid(0.6), RepeatLeft(), 16),
]


@pytest.fixture(scope="module")
def scene():
    return data.scene("small", "cpu")


@pytest.mark.parametrize("rule", [Greedy(), Gumbel()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_setting_is_autoregressive_decoding(scene, rule, dtype):
    model, condition = scene.model.to(dtype), scene.condition[:4]
    prefix = [codes[:n] for codes, n in zip(scene.codes, (0, 20, 40, 60))]
    arguments = dict(length=LENGTH, guidance=2.0, seed=11)
    want = hbsjd.rollout(model, condition, prefix, "ar_greedy" if rule == Greedy() else "ar", **arguments)
    for schedule, execution, draft, W in SETTINGS:
        got = hbsjd.rollout(model, condition, prefix, Method(rule, draft, schedule, execution, Fixed(W)), **arguments)
        assert_same(Guided(model, 2.0), condition, got, want, seed=11)


def test_a_window_pays(scene):
    """Real prefixes: fewer verifier forwards than tokens, by the margin that makes the method worth having."""
    model, prefix = scene.model.float(), scene.codes[:8, :128]
    for method, at_least in (("hbsjd", 2.5), ("hbsjd_gumbel", 2.0), ("hbsjd_probabilistic", 1.4)):
        counts = hbsjd.rollout(model, scene.condition[:8], prefix, method, guidance=2.0).counts()
        assert counts["committed"] / counts["row_rounds"] > at_least, method


def test_weights_are_what_their_provenance_says():
    from hbsjd.models.checkpoints import WEIGHTS, read_weights

    for path in WEIGHTS.glob("*.safetensors"):
        state, provenance = read_weights(path)
        assert {"command", "seed", "data", "recipe", "train_loss", "held_out", "curve"} <= set(provenance)
        assert all(value.dtype == torch.bfloat16 for value in state.values())
