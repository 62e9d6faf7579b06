"""Every named method: one line on the axes rule, draft, schedule, execution, window. In the comments: the paper's rollouts at B = 64 on an H200."""
from __future__ import annotations

from hbsjd.decoding.drafts import History
from hbsjd.decoding.execution import Compact, Full, Hybrid, Packed
from hbsjd.decoding.rules import Greedy, Gumbel, Maximal, Probabilistic
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.types import Method
from hbsjd.decoding.windows import Adaptive, Fixed

ABOVE = History(None)  # H = the grid's width
HYBRID = Hybrid(0.6)   # gamma, a fraction of the batch, until a calibration replaces it: 38 of 64 in the paper

METHODS: dict[str, Method] = {
    "ar": Method(Gumbel(), ABOVE, Independent(), Full(), Fixed(0)),
    "ar_greedy": Method(Greedy(), ABOVE, Independent(), Full(), Fixed(0)),                                # 3982 ms (Table 2)
    "sjd_lockstep": Method(Greedy(), ABOVE, Lockstep(), Full(), Fixed(16)),
    "sjd_lockstep_probabilistic": Method(Probabilistic(), ABOVE, Lockstep(), Full(), Fixed(16)),
    "sjd_lockstep_maximal": Method(Maximal(), ABOVE, Lockstep(), Full(), Fixed(16)),
    "sjd_lockstep_gumbel": Method(Gumbel(), ABOVE, Lockstep(), Full(), Fixed(16)),
    "sjd_synchronous": Method(Greedy(), ABOVE, Synchronous(), Full(), Fixed(16)),                         # 4239 ms, 241 rounds (Table 2)
    "sjd_synchronous_probabilistic": Method(Probabilistic(), ABOVE, Synchronous(), Full(), Fixed(16)),
    "sjd_synchronous_maximal": Method(Maximal(), ABOVE, Synchronous(), Full(), Fixed(16)),
    "sjd_synchronous_gumbel": Method(Gumbel(), ABOVE, Synchronous(), Full(), Fixed(16)),
    "hbsjd_full": Method(Greedy(), ABOVE, Independent(), Full(), Fixed(16)),                              # 3275 ms, 176 rounds (Table 2)
    "hbsjd_compact": Method(Greedy(), ABOVE, Independent(), Compact(), Fixed(16)),                        # 3104 ms (Table 3)
    "hbsjd_packed": Method(Greedy(), ABOVE, Independent(), Packed(), Fixed(16)),
    "hbsjd": Method(Greedy(), ABOVE, Independent(), HYBRID, Fixed(16)),                                   # 2784 ms (Table 3)
    "hbsjd_probabilistic": Method(Probabilistic(), ABOVE, Independent(), HYBRID, Fixed(16)),              # 1.46 x (Table 1)
    "hbsjd_maximal": Method(Maximal(), ABOVE, Independent(), HYBRID, Fixed(16)),
    "hbsjd_gumbel": Method(Gumbel(), ABOVE, Independent(), HYBRID, Fixed(16)),
    "hbsjd_adaptive": Method(Gumbel(), ABOVE, Independent(), Packed(), Adaptive()),
    "hbsjd_greedy_adaptive": Method(Greedy(), ABOVE, Independent(), Packed(), Adaptive()),
}
